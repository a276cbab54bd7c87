"""What is wrong in Accelerate, DeepSpeed and recipe configurations: all of it at once, before anything
starts.

Rules stand by file: `accelerate_file`, `fsdp_section`, `deepspeed_file`, `recipe_file`, `environment`, and
`together` for what several files say differently. Nothing is started, and no model is loaded: a named model
is built on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Plan
from toolkit.strategies import Found, load_file, read
from toolkit.training.check.accelerate_file import check_accelerate, engine_of, section_of
from toolkit.training.check.deepspeed_file import check_deepspeed
from toolkit.training.check.environment import check_default_file, check_environment
from toolkit.training.check.finding import ORDER, Finding, Findings, ModelFacts
from toolkit.training.check.fsdp_section import check_fsdp
from toolkit.training.check.recipe_file import KEYS, check_recipe
from toolkit.training.check.together import check_together
from toolkit.training.config import TrainConfig

RUN_FILES = ("accelerate.yaml", "ds_config.json", "train.yaml", "config.yaml")
"""What a run folder may hold."""
_POINTER = "deepspeed_config_file"


@dataclass(frozen=True)
class Checked:
    """The outcome: findings, worst first, and the plan that the files make."""

    files: tuple[tuple[str, str], ...]
    """(file, kind) of each file that was looked at."""
    findings: tuple[Finding, ...]
    plan: Plan | None

    def count(self, level: str) -> int:
        """How many findings of a level there are."""
        return sum(finding.level == level for finding in self.findings)


def check_files(paths: Sequence[Path], model: ModelFacts | None, environ: Mapping[str, str]) -> Checked:
    """Check configuration files, each by itself and all together.

    Args:
        paths: Accelerate YAMLs, DeepSpeed JSONs, recipe YAMLs, or run folders.
        model: what a named model's config says, or None.
        environ: the environment that a start would see.

    Raises:
        UserError: a file is missing or not readable.
    """
    contents = {str(path): load_file(path) for path in _expand(paths)}
    kinds = {path: kind_of(content) for path, content in contents.items()}
    findings = [finding for path, kind in kinds.items() if kind == "unknown" for finding in _unknown(path)]
    given = [path for path, kind in kinds.items() if kind == "deepspeed"]
    launches = [path for path, kind in kinds.items() if kind == "accelerate"]
    jsons = {path: _json_of(path, contents[path], given, findings) for path in launches}
    for named in jsons.values():
        if named is not None and named not in contents:
            contents[named], kinds[named] = load_file(Path(named)), "deepspeed"
    configs = [
        config
        for path, kind in kinds.items()
        if kind == "recipe" and (config := _recipe(path, contents[path], model, findings)) is not None
    ]
    for path in [path for path, kind in kinds.items() if kind == "deepspeed"]:
        out = Findings(path)
        check_deepspeed(contents[path], model, out)
        if launches and path not in jsons.values():
            out.warning("", "none of the Accelerate files here uses it")
        findings += out.found
    plan = None
    for path in launches:
        named = jsons[path]
        found = _launch(path, contents[path], contents[named] if named else None, configs, model, findings)
        plan = found.plan if found is not None else plan
    findings += check_environment(environ)
    if not launches:
        findings += check_default_file(environ)
    ranked = sorted(dict.fromkeys(findings), key=lambda finding: ORDER.index(finding.level))
    return Checked(tuple(kinds.items()), tuple(ranked), plan)


def kind_of(content: Mapping[str, Any]) -> str:
    """accelerate, deepspeed, recipe or unknown, by the keys of a file."""
    if "distributed_type" in content or "compute_environment" in content:
        return "accelerate"
    if "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content or "train_batch_size" in content:
        return "deepspeed"
    return "recipe" if len(KEYS & set(content)) >= 2 else "unknown"


def _expand(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = [path / name for name in RUN_FILES if (path / name).is_file()]
        if not inside:
            raise UserError(f"{str(path)!r} holds none of {', '.join(RUN_FILES)}; name the files to check")
        files += inside
    return files


def _unknown(path: str) -> list[Finding]:
    out = Findings(path)
    out.error(
        "",
        "is none of the files known here: an Accelerate file has distributed_type, a DeepSpeed JSON "
        "zero_optimization, a recipe's configuration model and data",
    )
    return out.found


def _json_of(path: str, content: Mapping[str, Any], given: Sequence[str], findings: list[Finding]) -> str | None:
    """The JSON that an Accelerate file uses: the one it points at, else the only one that was given."""
    if engine_of(content) != "DEEPSPEED":
        return None
    named = section_of(content, "deepspeed_config").get(_POINTER)
    alone = given[0] if len(given) == 1 else None
    if named in (None, "none"):
        return alone
    folder = Path(path).resolve().parent
    for place in (Path(str(named)), *(parent / str(named) for parent in (folder, *folder.parents))):
        if place.is_file():
            return next((p for p in given if Path(p).resolve() == place.resolve()), str(place))
    if alone is None:
        out = Findings(path)
        out.error(
            f"deepspeed_config.{_POINTER}",
            f"{str(named)!r} does not exist, neither here nor beside this file",
        )
        findings += out.found
    return alone


def _recipe(path: str, content: Mapping[str, Any], model: ModelFacts | None, findings: list[Finding]) -> TrainConfig | None:
    out = Findings(path)
    config = check_recipe(content, model, out)
    findings += out.found
    return config


def _launch(
    path: str,
    content: Mapping[str, Any],
    deepspeed: Mapping[str, Any] | None,
    configs: Sequence[TrainConfig],
    model: ModelFacts | None,
    findings: list[Finding],
) -> Found | None:
    """Check an Accelerate file by itself and with what belongs to it; the plan that it makes, if it makes one."""
    out = Findings(path)
    check_accelerate(content, out)
    check_fsdp(content, model, out)
    found = None
    try:
        # Any width does for the model's: only the kind of plan matters here, not its sizes.
        found = read(_without_json(content), deepspeed, hidden_size=(model and model.hidden_size) or 1)
    except UserError as error:
        if not any(finding.level == "error" for finding in (*out.found, *findings)):
            out.error("", str(error))
    if found is not None and not any(finding.level == "error" for finding in out.found):
        partners: Sequence[TrainConfig | None] = configs or (None,)
        for config in partners:
            check_together(found, config, deepspeed, model, out)
        for note in found.notes:
            out.note("", note)
    findings += out.found
    return found


def _without_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """The file without its pointer to a JSON, which was followed already."""
    section = {key: value for key, value in section_of(content, "deepspeed_config").items() if key != _POINTER}
    return {**content, "deepspeed_config": section} if "deepspeed_config" in content else dict(content)
