"""Before the weights are loaded: does this run fit on this machine? The estimate is kept for predicted against measured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from toolkit.errors import NothingFits, UserError
from toolkit.estimate.result import Estimate
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.training.accelerator import launch_file, requested_engine, without_sharded_init
from toolkit.training.config import TrainConfig
from toolkit.training.lighter import lighter_or_none
from toolkit.training.metrics import Log
from toolkit.units import format_size

if TYPE_CHECKING:
    from accelerate import Accelerator


def cluster_of(accelerator: Accelerator) -> Cluster:
    """The machines of this run as the estimate sees them: a CPU process has its share of the machine's RAM."""
    from toolkit.specs.detect import cpu_gpu, detect_gpus, host_ram

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = max(1, accelerator.num_processes // local)
    if accelerator.device.type == "cuda":
        return Cluster(gpu=detect_gpus()[0], gpus_per_node=local, nodes=nodes, host_memory=host_ram())
    return Cluster(gpu=cpu_gpu(local), gpus_per_node=local, nodes=nodes)


class Preflight:
    """The estimate of one run on its real device. The main process makes it; every rank must call both methods.

    A run is not held up by a fault of the estimate: what goes wrong in it is said in the log.
    """

    def __init__(self, config: TrainConfig, model_config: Any, accelerator: Accelerator, log: Log) -> None:
        from toolkit.estimate.engine import Estimator

        self.config, self.accelerator, self.log = config, accelerator, log
        self.cluster = cluster_of(accelerator)
        self.spec = ModelSpec(name=config.model, config=model_config.to_dict(), source=config.model,
                              trust_remote_code=config.trust_remote_code)
        self.estimator: Estimator | None = Estimator(self.spec) if accelerator.is_main_process else None
        self.made: Estimate | None = None
        self.plan: Plan | None = None
        self.figures: dict[str, int] = {}
        """`peak_allocated` and `peak_total` as predicted, on every rank; empty without a pre-flight."""

    def check(self) -> None:
        """Hold the run to the memory of its device and host.

        Raises:
            NothingFits: with `preflight: stop`, on every rank, when it does not fit; the lighter plans stand in the log.
        """
        if self.config.preflight == "off":
            return
        verdict = None
        if self.estimator is not None:
            try:
                plan = _asked_plan(self.config, self.spec)
            except UserError as error:
                plan = None
                self.log.say(f"note: no pre-flight ({error})")
            found = self._estimate(plan) if plan is not None else None
            if found is not None:
                verdict = self._told(found)
                self.figures = {name: getattr(found.memory, name) for name in ("peak_allocated", "peak_total")}
        from accelerate.utils import broadcast_object_list

        shared: list[Any] = [verdict, self.figures, self.plan]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(shared, from_process=0)
        self.figures, self.plan = shared[1], shared[2]
        if shared[0] is not None and self.config.preflight == "stop":
            raise NothingFits(f"{shared[0]}; preflight=warn starts it all the same")

    def _told(self, found: Estimate) -> str | None:
        """Say what is expected; returns what is wrong with it, or None."""
        memory, unit = found.memory, "process" if found.cluster.gpu.is_cpu else "GPU"
        worst = max(memory.peak_total, memory.first_step_peak + memory.outside_allocator)
        host = f"; host memory {format_size(memory.host.peak)}" if memory.host.peak else ""
        if memory.host.peak and memory.host.capacity:
            host += f" of {format_size(memory.host.capacity)}"
        self.log.say(f"pre-flight: {format_size(worst)} of {format_size(memory.capacity)} per {unit} at "
                     f"{memory.at_peak.phase}{host}")
        if worst <= memory.capacity and memory.host.fits:
            return None
        short = worst - memory.capacity
        what = (f"this run does not fit: {format_size(short)} too much for {format_size(memory.capacity)} per {unit}" if short > 0
                else f"this run does not fit: the host needs {format_size(memory.host.peak)} of "
                     f"{format_size(memory.host.capacity or 0)}")
        self.log.say(what)
        for option in lighter_or_none(self.spec, self.workload, found.plan, found.cluster, launch_file()):
            self.log.say(f"  lighter: {option}")
        return what

    def _estimate(self, plan: Plan) -> Estimate | None:
        import torch

        if self.made is not None and plan == self.plan:
            return self.made
        assert self.estimator is not None  # noqa: S101 - only the main process comes here
        try:
            with without_sharded_init(self.accelerator), torch.random.fork_rng(devices=[]):
                self.made = self.estimator.estimate(self.workload, plan, self.cluster)
        except Exception as error:  # noqa: BLE001 - see the class
            self.log.say(f"note: this run's memory is not predicted ({type(error).__name__}: {' '.join(str(error).split())})")
            self.made = None
        self.plan = plan
        return self.made

    @property
    def workload(self) -> Workload:
        """What is estimated: the recipe's forward returns the loss alone, and its rows may be packed."""
        return self.config.workload.with_(loss_only=True, packed=self.config.packing)

    def predicted(self, plan: Plan) -> dict[str, Any] | None:
        """`memory` of the estimate of the plan that really runs, with its `timeline`, as plain data; None where there is none.

        The model was traced for the pre-flight; a plan that reads back in more detail than its file costs a replay, no trace.
        """
        if self.estimator is None:
            self.plan = plan
            return None
        found = self._estimate(plan)
        estimator, self.estimator = self.estimator, None
        if found is None:
            return None
        timeline = estimator.timeline(self.workload, plan, self.cluster)
        return {**found.to_json()["memory"], "timeline": timeline, "step_seconds": self.step_seconds}

    @property
    def step_seconds(self) -> float | None:
        """What the estimate says of a step's time; None on a CPU and on ranks without an estimate."""
        time = self.made.time if self.made is not None else None
        return time.step_seconds if time is not None and time.mfu is not None else None

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation of the run at this speed, 0 to 1; None on a CPU and on ranks without an estimate.

        The estimate says which speed would be which utilisation; the two are proportional.
        """
        time = self.made.time if self.made is not None else None
        if time is None or time.mfu is None:
            return None
        return time.mfu * tokens_per_second / time.tokens_per_second


def _asked_plan(config: TrainConfig, spec: ModelSpec) -> Plan:
    """The plan as the launch file has it, before anything is prepared.

    Raises:
        UserError: it can't be read, or the engine was asked for by other means than a file.
    """
    from toolkit.strategies import read
    from toolkit.strategies.zero.autos import hidden_size_of

    file, engine = launch_file(), requested_engine()
    if engine in ("single", "ddp"):
        return Plan(strategy=engine, checkpointing=config.checkpointing)
    if file is None or not file.is_file():
        raise UserError(f"{engine} was launched without a --config_file that can be read")
    plan = read(file, hidden_size=hidden_size_of(spec.config)).plan
    return plan.with_(checkpointing=config.checkpointing)
