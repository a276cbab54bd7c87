"""Fine-tune a causal language model, on any engine that Accelerate launches.

    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train.py --config
    recipes/configs/chat.yaml

The launch file says how the run is spread over devices, the config says what is trained; docs/training.md
explains every key. The file reads from top to bottom in the order in which things happen.
"""

from __future__ import annotations

import gc
import math
import time

from toolkit.profiling.counter import preload
from toolkit.training.config import parse_arguments
from toolkit.training.start import check_processes, run


def main(arguments: list[str]) -> None:
    # What is to be done. Whatever can be found wrong before anything is started is found here.
    config = parse_arguments(arguments)
    from toolkit.training.checkpoint import Checkpoints, Identity
    from toolkit.training.data.read import check_sources
    from toolkit.training.run_folder import RunFolder, check_output, check_room

    check_sources(config.data + config.eval_data)
    check_output(config)
    from toolkit.training.model import (
        build_model,
        check_source,
        count_parameters,
        find_source,
        isolates_by_position,
        load_config,
        load_tokenizer,
    )  # fmt: skip

    check_source(config)
    check_processes()

    # The engine that was launched.
    from accelerate.utils import set_seed

    from toolkit.training.accelerator import build_accelerator, running_plan, verify_engine
    from toolkit.training.data.prepare import prepare_data
    from toolkit.training.export import export_model
    from toolkit.training.memory import STEADY_FROM, MemoryWatch, report_memory
    from toolkit.training.metrics import Log, Metrics
    from toolkit.training.oom import explain_out_of_memory
    from toolkit.training.optimizer import build_optimizer, rate_at, set_rate
    from toolkit.training.preflight import Preflight
    from toolkit.training.step import across_ranks, check_finite, count_batch, evaluate, gradient_norm
    from toolkit.training.stop import StopSignals

    accelerator = build_accelerator(config)
    device, world, log = accelerator.device, accelerator.num_processes, Log(accelerator)

    # The data, then the model.
    source = find_source(config, accelerator)
    tokenizer, model_config = load_tokenizer(config, source), load_config(config, source)
    data = prepare_data(config, tokenizer, model_config, accelerator, isolates=isolates_by_position(model_config))
    total_steps = config.max_steps or math.ceil((config.epochs or 0) * data.train.steps_per_epoch)
    preflight = Preflight(config, model_config, accelerator, log)
    preflight.check()
    memory = MemoryWatch(device.type)
    explain_out_of_memory(preflight, memory)
    model = build_model(config, source, model_config, tokenizer, accelerator)
    parameters, trainable = count_parameters(model)
    check_room(config, parameters, trainable)

    # The optimizer, and the engine around both.
    optimizer = build_optimizer(config, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    verify_engine(accelerator, model)
    plan = running_plan(accelerator, model, config)
    if config.profile:
        memory.follow(model, optimizer)

    # The run folder, and the checkpoint to go on from.
    folder = RunFolder(config, accelerator)
    identity = Identity.of(config, plan, data, tokenizer, world)
    checkpoints = Checkpoints(folder.path / "checkpoints", accelerator, identity, config.keep, log.say, folder.told(plan),
                              mode=config.checkpoint_mode, on_error=config.on_save_error)
    found = checkpoints.find(config.resume)
    set_seed(config.seed, device_specific=True)  # From here on: other dropout masks on every rank.
    done = checkpoints.begin(found)
    folder.write(plan, model, data, tokenizer, model_config)
    predicted = preflight.predicted(plan)
    log.facts(folder.description(plan, parameters, trainable, data, total_steps, predicted, checkpoints.resumed))
    gc.collect()

    # The loop. A step is one update of the weights from `accumulate` micro-batches on each rank.
    metrics = Metrics(log, accelerator, folder.path / "metrics.jsonl", total=total_steps, first=done.step + 1,
                      log_every=config.log_every)
    with metrics, StopSignals() as stop:
        if data.evaluation and done.step == 0:
            metrics.evaluation(0, *evaluate(accelerator, model, data.evaluation))
        for step in range(done.step + 1, total_steps + 1):
            started = time.perf_counter()
            memory.begin_step()
            batches = data.train.step(step - 1)
            targets, tokens, stops, writers = count_batch(accelerator, batches, stop.asked, checkpoints.busy)
            checkpoints.advance(writers)
            if stops:
                break
            rate = rate_at(step - done.skipped, total_steps, config, world)
            set_rate(optimizer, rate)
            loss_sum, loss, grad_norm = 0.0, math.nan, math.nan
            for batch in batches:
                with accelerator.accumulate(model):
                    summed = model(**batch.to(device))
                    loss_sum = loss_sum + summed.detach().double()
                    if accelerator.sync_gradients:
                        loss = across_ranks(accelerator, float(loss_sum))[0] / targets
                        check_finite("the loss", loss, step, checkpoints.newest())
                    # Engines average gradients over ranks and micro-batches; every token is to weigh the same.
                    accelerator.backward(summed * (world * config.accumulate / targets))
                    del summed
                    if accelerator.sync_gradients:
                        grad_norm = gradient_norm(accelerator, model, config.clip)
                        if config.precision != "fp16":
                            check_finite("the gradient norm", grad_norm, step, checkpoints.newest())
                    optimizer.step()
                    optimizer.zero_grad()
            done = done.after(tokens, skipped=accelerator.optimizer_step_was_skipped)
            seconds = time.perf_counter() - started
            metrics.step({
                "step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": rate, "tokens": tokens,
                "tokens_per_second": tokens / seconds, "step_seconds": seconds, "mfu": preflight.mfu(tokens / seconds),
                "memory_peak": memory.end_step(), "target_tokens": targets,
            })  # fmt: skip
            if config.profile and len(memory.peaks) == STEADY_FROM:
                report_memory(memory, predicted, folder, log, model, optimizer, table=True)
            last = step == total_steps
            if data.evaluation and (last or step % config.eval_every == 0):
                metrics.evaluation(step, *evaluate(accelerator, model, data.evaluation))
            if config.checkpoint_every and (last or step % config.checkpoint_every == 0):
                checkpoints.save(done)
        checkpoints.wait()
        if done.step < total_steps:
            stop.leave(accelerator, done.step, *checkpoints.secure(done))

    # What came of it.
    report_memory(memory, predicted, folder, log, model, optimizer, table=False)
    if config.export:
        export_model(config, accelerator, model, tokenizer, model_config, folder.path / "export")
        log.say(f"exported to {folder.path / 'export'}")
    accelerator.end_training()


if __name__ == "__main__":
    preload()
    run(main)
