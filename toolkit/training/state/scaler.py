"""The loss scale of fp16 training as plain numbers: torch's GradScaler and DeepSpeed's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

_DEEPSPEED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _deepspeed_scaler(accelerator: Accelerator) -> Any:
    optimizer = getattr(accelerator._models[-1], "optimizer", None)
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def scaler_state(accelerator: Accelerator) -> dict[str, Any] | None:
    """{"kind", "scale", "values"}; None where nothing is scaled."""
    deepspeed = _deepspeed_scaler(accelerator)
    if deepspeed is not None:
        values = {name: getattr(deepspeed, name) for name in _DEEPSPEED if hasattr(deepspeed, name)}
        return {"kind": "deepspeed", "scale": float(deepspeed.cur_scale), "values": values}
    values = accelerator.scaler.state_dict() if accelerator.scaler is not None else {}
    return {"kind": "torch", "scale": values["scale"], "values": values} if values else None


def restore_scaler(accelerator: Accelerator, state: dict[str, Any] | None) -> None:
    """Set the loss scale; of the other kind of scaler, the scale alone can be taken over."""
    if state is None:
        return
    deepspeed = _deepspeed_scaler(accelerator)
    if deepspeed is not None:
        values = state["values"] if state["kind"] == "deepspeed" else {"cur_scale": state["scale"]}
        for name, value in values.items():
            setattr(deepspeed, name, value)
    elif accelerator.scaler is not None and accelerator.scaler.state_dict():
        values = state["values"] if state["kind"] == "torch" else {"scale": state["scale"]}
        accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), **values})
