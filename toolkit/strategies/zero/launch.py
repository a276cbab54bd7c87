"""DeepSpeed ZeRO as Accelerate runs it: distributed type DEEPSPEED and a DeepSpeed JSON.

Facts from accelerate 1.15 (`accelerate/utils/dataclasses.py` DeepSpeedPlugin, `accelerate/accelerator.py`
`_prepare_deepspeed`) and deepspeed 0.19.8 (`deepspeed/runtime/zero/config.py`). The JSON is the only source
of what it
names: with it, Accelerate refuses the same things in its own file. What the recipe decides stays "auto"
    there: batch sizes, accumulation, clipping, precision.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload, ZeroSettings
from toolkit.strategies.base import DEEPSPEED_FILE, LaunchFiles, StrategyInfo, accelerate_base, recipe_keys
from toolkit.strategies.parallel import launch as parallel
from toolkit.strategies.zero.defaults import engine_defaults
from toolkit.strategies.zero.files import NVME_PATH, SETTINGS, SIZES, STAGE3, observe, read

STRATEGIES = (
    StrategyInfo(
        name="zero1",
        family="zero",
        engine="DEEPSPEED",
        summary="DeepSpeed ZeRO-1: optimizer state sharded",
        when="the optimizer is what does not fit: as little communication as ddp",
        shards=("optimizer",),
        offloads=("none", "optimizer"),
        offload_to=("cpu",),
        axes=("sp",),
        needs="deepspeed; for offload a C++ compiler, once",
        excludes="bf16-pure precision, and fp16 on a CPU",
    ),
    StrategyInfo(
        name="zero2",
        family="zero",
        engine="DEEPSPEED",
        summary="DeepSpeed ZeRO-2: gradients and optimizer state sharded",
        when="gradients and optimizer do not fit; or, with the optimizer offloaded, one GPU must do",
        shards=("gradients", "optimizer"),
        offloads=("none", "optimizer"),
        offload_to=("cpu",),
        axes=("sp",),
        needs="deepspeed; for offload a C++ compiler, once",
        excludes="bf16-pure precision, and fp16 on a CPU",
    ),
    StrategyInfo(
        name="zero3",
        family="zero",
        engine="DEEPSPEED",
        summary="DeepSpeed ZeRO-3: parameters, gradients and optimizer state sharded",
        when=(
            "the model does not fit, and it should be offloaded to the host or to NVMe, which FSDP2 "
            "can't in part"
        ),
        shards=("parameters", "gradients", "optimizer"),
        offloads=("none", "optimizer", "all"),
        offload_to=("cpu", "nvme"),
        axes=("sp",),
        needs="deepspeed; for offload a C++ compiler, once; for NVMe libaio",
        excludes="bf16-pure precision, and fp16 on a CPU",
    ),
)
ACCELERATE_CLIP = 1.0
"""Accelerate fills in this clipping where a DeepSpeed config leaves it "auto" (accelerator.py,
`_prepare_deepspeed`)."""
MANAGED_OPTIMIZERS = ("adamw",)
"""What Accelerate swaps for DeepSpeed's CPU Adam on offload without changing what it computes."""

__all__ = [
    "ACCELERATE_CLIP",
    "STRATEGIES",
    "canonical",
    "check",
    "effective",
    "observe",
    "persistence",
    "read",
    "render",
]


def effective(plan: Plan, workload: Workload) -> ZeroSettings:
    """Every setting of DeepSpeed as it runs, the engine's own where the plan says nothing.

    Sizes are in elements. `grad_accum_dtype` is the model's dtype unless it was set
    (deepspeed/runtime/engine.py, `get_data_types`); `gradient_clipping` is what the workload asks for, else
    Accelerate's silent 1.0.
    """
    engine, stated = engine_defaults(), plan.zero
    values: dict[str, Any] = dict(vars(stated))
    for name, key in SETTINGS.items():
        if values[name] is None and name in SIZES:
            values[name] = plan.bucket
        if values[name] is None:
            values[name] = engine[key]
    if values["overlap_comm"] is None:
        values["overlap_comm"] = plan.strategy == "zero3"
    if values["grad_accum_dtype"] is None:
        values["grad_accum_dtype"] = "bf16" if workload.precision == "bf16-pure" else workload.precision
    if values["gradient_clipping"] is None:
        values["gradient_clipping"] = ACCELERATE_CLIP if workload.clip is None else workload.clip
    if stated.pin_memory is None:
        values["pin_memory"] = plan.offload != "none" and bool(engine["pin_memory"])
    return ZeroSettings(**values)


def persistence(plan: Plan) -> int:
    """Elements up to which ZeRO-3 keeps a parameter whole on every rank."""
    return (
        int(engine_defaults()["stage3_param_persistence_threshold"]) if plan.persist is None else plan.persist
    )


def check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Refuse what DeepSpeed refuses, or would silently do otherwise.

    Raises:
        UserError: names the two things that exclude each other.
    """
    if workload.precision == "bf16-pure":
        raise UserError(
            f"precision bf16-pure and {plan.strategy} exclude each other: DeepSpeed keeps fp32 master "
            "weights; "
            "use precision bf16, or ddp or fsdp"
        )
    if workload.precision == "fp16" and cluster.gpu.is_cpu:
        raise UserError(
            f"precision fp16 and {plan.strategy} on a CPU exclude each other: DeepSpeed refuses it; use "
            "bf16 or "
            "fp32"
        )
    if plan.offload != "none" and "8bit" in workload.optimizer:
        raise UserError(
            f"optimizer {workload.optimizer} and offload {plan.offload} exclude each other: the 8-bit "
            "kernels "
            "run on a GPU only; use adamw"
        )
    if plan.persist is not None and plan.strategy != "zero3":
        raise UserError(f"persist and {plan.strategy} exclude each other: the threshold is zero3's")
    if plan.persist is not None and plan.persist < 0:
        raise UserError(f"persist is {plan.persist}; it must be 0 or more elements")


def render(plan: Plan, workload: Workload, cluster: Cluster) -> LaunchFiles:
    """An Accelerate file of distributed type DEEPSPEED and the JSON it points at."""
    content = accelerate_base("DEEPSPEED", cluster)
    content["deepspeed_config"] = {"deepspeed_config_file": DEEPSPEED_FILE}
    if cluster.nodes > 1:
        # Without it Accelerate starts the nodes over ssh with pdsh and a hostfile.
        content["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    if degrees := parallel.render(plan, workload, cluster):
        content["parallelism_config"] = degrees
    return LaunchFiles(
        plan=plan,
        accelerate=content,
        deepspeed=_deepspeed(plan, workload),
        recipe=recipe_keys(plan),
        nodes=cluster.nodes,
    )


def _deepspeed(plan: Plan, workload: Workload) -> dict[str, Any]:
    stated = canonical_settings(plan)
    clipping = stated.pop("gradient_clipping")
    accumulation = stated.pop("grad_accum_dtype")
    pin = stated.pop("pin_memory")
    content: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto" if clipping is None else clipping,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    if accumulation is not None:
        content["data_types"] = {"grad_accum_dtype": accumulation}
    section: dict[str, Any] = {"stage": int(plan.strategy[-1])}
    if plan.offload != "none":
        where: dict[str, Any] = {"device": plan.offload_to}
        if plan.offload_to == "nvme":
            where["nvme_path"] = NVME_PATH
        if pin is not None:
            where["pin_memory"] = pin
        section["offload_optimizer"] = dict(where)
        if plan.offload == "all":
            section["offload_param"] = dict(where)
        if workload.optimizer not in MANAGED_OPTIMIZERS:
            # Accelerate would replace any optimizer by DeepSpeed's CPU Adam; torch's own steps on the host
            # instead.
            content["zero_force_ds_cpu_optimizer"] = False
    section |= {SETTINGS[name]: value for name, value in stated.items() if value is not None}
    if plan.persist is not None:
        section["stage3_param_persistence_threshold"] = plan.persist
    content["zero_optimization"] = section
    return content


def canonical_settings(plan: Plan) -> dict[str, Any]:
    """What is written of the settings: buckets by their own names, and the gathering that an export needs."""
    stage3 = plan.strategy == "zero3"
    values = dict(vars(plan.zero))
    if not stage3:
        values |= dict.fromkeys(STAGE3)
    for name in SIZES if stage3 else SIZES[:2]:
        if values[name] is None:
            values[name] = plan.bucket
    if stage3 and values["gather_16bit_on_save"] is None:
        # Without it a ZeRO-3 run fails when it saves the model, after the training.
        values["gather_16bit_on_save"] = True
    return values


def canonical(plan: Plan, cluster: Cluster) -> Plan:
    """Equal buckets under `bucket`, others under their own names; settings of other stages left out."""
    values = canonical_settings(plan)
    names = SIZES if plan.strategy == "zero3" else SIZES[:2]
    sizes = {values[name] for name in names}
    bucket = sizes.pop() if len(sizes) == 1 else None
    if bucket is not None:
        values |= dict.fromkeys(names)
    if plan.offload == "none":
        values["pin_memory"] = None
    return plan.with_(bucket=bucket, zero=ZeroSettings(**values))
