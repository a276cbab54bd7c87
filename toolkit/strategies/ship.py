"""The launch files that come with the repository: `python -m toolkit.strategies.ship` writes them anew.

They are what `render` gives for the plans below, with a comment on top; the table of docs/strategies.md is
made from the registry. A test holds all of them to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UserError
from toolkit.specs import Cluster, Gpu, Plan, Workload, ZeroSettings
from toolkit.specs.plan import Offload, OffloadTo, StrategyName
from toolkit.strategies import STRATEGIES, render
from toolkit.strategies.base import LaunchFiles, write_whole
from toolkit.strategies.zero.files import NVME_PATH

ACCELERATE_FOLDER, DEEPSPEED_FOLDER = "recipes/accelerate", "ds_configs"
PAGE = "docs/strategies.md"
TABLE_MARKS = ("<!-- table: python -m toolkit.strategies.ship -->", "<!-- end of table -->")
BUCKET = 50_000_000
"""Elements of DeepSpeed's buckets: 100 MB in 16 bit, large enough for full bandwidth, a tenth of DeepSpeed's
default."""
PERSIST = 100_000
"""Elements: norms and biases stay whole on every rank, matrices are split."""
SUB_GROUP = 100_000_000
"""Elements that ZeRO-3 steps at a time: 0.4 GB of fp32 gradients at once, a tenth of DeepSpeed's default."""
_ANY = Gpu(
    name="any",
    memory=1,
    bf16_flops=None,
    fp16_flops=None,
    fp32_flops=1.0,
    bandwidth=1.0,
    link="nvlink",
    link_bandwidth=1.0,
    pcie_bandwidth=1.0,
)
"""Launch files are the same for every GPU."""


@dataclass(frozen=True)
class Shipped:
    """One plan that comes as a file."""

    plan: Plan
    processes: int
    when: str
    """When to take it, one line."""

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.plan.label

    @property
    def files(self) -> LaunchFiles:
        """What the strategy renders."""
        return render(self.plan, Workload(), Cluster(gpu=_ANY, gpus_per_node=self.processes))

    def accelerate_text(self) -> str:
        """The YAML with its comment."""
        number = "" if self.plan.strategy == "single" else " --num_processes N"
        comment = [
            f"# {self.name}: {STRATEGIES[self.plan.strategy].summary}.",
            f"# Use it when {self.when}.",
            f"# accelerate launch --config_file {ACCELERATE_FOLDER}/{self.name}.yaml{number} "
            "recipes/train.py --config CONFIG.yaml",
        ]
        if self.plan.strategy == "hsdp":
            comment.append("# dp_replicate_size x dp_shard_size is the number of processes: dp_shard_size GPUs share a copy.")
        return "\n".join(comment) + "\n" + self.files.accelerate_yaml(f"{DEEPSPEED_FOLDER}/{self.name}.json")


def _zero(strategy: StrategyName, offload: Offload = "none", to: OffloadTo = "cpu") -> Plan:
    stage3 = strategy == "zero3"
    settings = ZeroSettings(sub_group_size=SUB_GROUP if stage3 else None, overlap_comm=True)
    return Plan(
        strategy=strategy,
        offload=offload,
        offload_to=to,
        bucket=BUCKET,
        persist=PERSIST if stage3 else None,
        zero=settings,
    )


_HOST = "the GPUs can't hold it but the host's memory can"
SHIPPED: tuple[Shipped, ...] = (
    Shipped(Plan(strategy="single"), 1, STRATEGIES["single"].when),
    Shipped(Plan(strategy="ddp"), 2, STRATEGIES["ddp"].when),
    Shipped(_zero("zero1"), 2, STRATEGIES["zero1"].when),
    Shipped(_zero("zero2"), 2, STRATEGIES["zero2"].when),
    Shipped(Plan(strategy="fsdp-grad"), 2, STRATEGIES["fsdp-grad"].when),
    Shipped(Plan(strategy="fsdp"), 2, STRATEGIES["fsdp"].when),
    Shipped(_zero("zero3"), 2, STRATEGIES["zero3"].when),
    Shipped(Plan(strategy="hsdp", shard_size=2), 4, STRATEGIES["hsdp"].when),
    Shipped(_zero("zero1", "optimizer"), 2, f"{_HOST}: optimizer state and step on the host, the rest as zero1"),
    Shipped(_zero("zero2", "optimizer"), 2, f"{_HOST}: optimizer state, gradients and step on the host"),
    Shipped(
        _zero("zero3", "optimizer"),
        2,
        f"{_HOST}: optimizer state and step on the host, parameters split over GPUs",
    ),
    Shipped(
        Plan(strategy="fsdp", offload="all"),
        2,
        f"{_HOST}: parameters, gradients and step on the host, by FSDP2",
    ),
    Shipped(_zero("zero3", "all"), 2, f"{_HOST}: parameters, gradients and step on the host, by DeepSpeed"),
    Shipped(
        _zero("zero3", "optimizer", "nvme"),
        2,
        f"the host can't hold the optimizer either, but an NVMe disk at {NVME_PATH} can",
    ),
    Shipped(
        _zero("zero3", "all", "nvme"),
        2,
        f"the host can't hold the model either, but an NVMe disk at {NVME_PATH} can: last and slowest",
    ),
)


def texts() -> dict[str, str]:
    """Every shipped file's text by its path in the repository."""
    files = {}
    for shipped in SHIPPED:
        files[f"{ACCELERATE_FOLDER}/{shipped.name}.yaml"] = shipped.accelerate_text()
        if (text := shipped.files.deepspeed_json()) is not None:
            files[f"{DEEPSPEED_FOLDER}/{shipped.name}.json"] = text
    files[f"{ACCELERATE_FOLDER}/README.md"] = _accelerate_readme()
    files[f"{DEEPSPEED_FOLDER}/README.md"] = _deepspeed_readme()
    return files


def _table(ending: str) -> list[str]:
    lines = ["| file | what is split over the ranks | use it when |", "|---|---|---|"]
    for shipped in SHIPPED:
        if ending == "json" and shipped.files.deepspeed is None:
            continue
        split = ", ".join(STRATEGIES[shipped.plan.strategy].shards) or "nothing"
        lines.append(f"| [`{shipped.name}.{ending}`]({shipped.name}.{ending}) | {split} | {shipped.when} |")
    return lines


def _accelerate_readme() -> str:
    text = f"""# How a run is spread

Each file is one strategy, lightest first. They hold no hyperparameter: what is trained stands in
the recipe's own configuration, precision, accumulation and clipping too. The same file serves GPUs
and a rehearsal on a machine without any. Start them from the root of the repository:

```
accelerate launch --config_file {ACCELERATE_FOLDER}/fsdp.yaml --num_processes 8 \\
  recipes/train.py --config CONFIG.yaml
```

`--num_processes` is the number of GPUs of all machines together; without it the files start two
processes (`single` one, `hsdp` four). `toolkit recommend MODEL --write RUN` writes such a file for
your model and your machines, with buckets that fit and the number of processes filled in; that is
better than any of these wherever it can be had.

{{table}}

Offload needs a C++ compiler once, for DeepSpeed's CPU Adam, and NVMe the library libaio. Files that
offload to NVMe name the folder `{NVME_PATH}` in `{DEEPSPEED_FOLDER}`: put your own disk there.

A script of your own that does not set its precision takes it from `--mixed_precision bf16`.

`python -m toolkit.strategies.ship` writes these files; a test keeps them what the toolkit renders.
"""
    return text.replace("{table}", "\n".join(_table("yaml")))


def _deepspeed_readme() -> str:
    text = f"""# DeepSpeed configurations

The JSON files that `{ACCELERATE_FOLDER}/NAME.yaml` of the same name point at. They also work as
`deepspeed=` of a Hugging Face Trainer.

{{table}}

- `"auto"` stands only where the recipe (or the Trainer) decides and fills in: batch sizes,
  accumulation, clipping and precision. Nothing else may be `"auto"`: it would stay a word and fail
  late; `toolkit check` finds it.
- Buckets of {BUCKET:,} elements take 100 MB each in 16 bit. DeepSpeed's own default of 500,000,000
  takes 1 GB, twice with `overlap_comm`, whatever the size of the model.
- `stage3_param_persistence_threshold`: parameters of up to {PERSIST:,} elements (norms, biases)
  stay whole.
- `sub_group_size`: ZeRO-3 steps {SUB_GROUP:,} elements at a time, with 0.4 GB of fp32 gradients at
  once.
- `stage3_gather_16bit_weights_on_model_save`: without it saving the model fails after the training.
- `{NVME_PATH}` is a place holder for the folder of your NVMe disk.

`python -m toolkit.strategies.ship` writes these files; a test keeps them what the toolkit renders.
"""
    return text.replace("{table}", "\n".join(_table("json")))


def strategy_table() -> str:
    """The registry as a Markdown table."""
    lines = ["| strategy | what is split over the ranks | engine | offload | degrees | needs, excludes |"]
    lines.append("|---|---|---|---|---|---|")
    for info in STRATEGIES.values():
        split = ", ".join(info.shards) or "nothing"
        offloads = [f"{what} to {' or '.join(info.offload_to)}" for what in info.offloads if what != "none"]
        limits = [f"at least {info.min_world} GPUs"] if info.min_world > 1 else []
        limits += [f"needs {info.needs}"] if info.needs else []
        limits += [f"not with {info.excludes}"] if info.excludes else []
        cells = (f"`{info.name}`", split, info.engine, "; ".join(offloads), ", ".join(info.axes), "; ".join(limits))
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The documentation page with its table made anew.

    Raises:
        UserError: the page has not the two marks that the table stands between.
    """
    before, start, rest = page.partition(TABLE_MARKS[0])
    _, end, after = rest.partition(TABLE_MARKS[1])
    if not start or not end:
        raise UserError(f"{PAGE} lacks the marks {' and '.join(TABLE_MARKS)}")
    return f"{before}{start}\n{strategy_table()}\n{end}{after}"


def main(root: Path = Path()) -> None:
    """Write every shipped file below a folder, and the table of the documentation page if it is there."""
    for path, text in texts().items():
        write_whole(root / path, text)
    if (root / PAGE).is_file():
        write_whole(root / PAGE, with_table((root / PAGE).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
