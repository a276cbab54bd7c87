"""From the raw segments of a cut model to the trace of the whole one: equal layers are repeated."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from toolkit.specs import Workload
from toolkit.timeline.build import BuiltModel, Stack
from toolkit.timeline.kernels import code_size
from toolkit.timeline.recorder import RawMark, RawMemory, Recorder, Segment
from toolkit.timeline.shards import local
from toolkit.timeline.trace import Item, Mark, Memory, ModelTrace, Operation, ParameterInfo


class _Expander:
    """Knows where each raw segment stands among the stacks and renames layers, storages and modules."""

    def __init__(self, built: BuiltModel, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stacks = {stack.path: stack for stack in built.stacks}
        self.base: dict[str, int] = {}
        total = 0
        for stack in built.stacks:
            self.base[stack.path] = total
            total += stack.depth
        self.place = [self._locate(segment) for segment in recorder.segments]
        self.items: list[Item] = []

    def _locate(self, segment: Segment) -> tuple[Stack, int] | None:
        if not segment.layer:
            return None
        path, _, index = segment.layer.rpartition(".")
        return self.stacks[path], int(index)

    def category(self, number: int) -> str:
        born = self.recorder.storages[number]
        if born.gradient:
            return "gradients"
        located = self.place[born.segment]
        in_head = born.phase == "loss" or (located is None and born.module in ("", self.recorder.head_path))
        if in_head:
            return "logits_and_loss"
        if born.phase == "backward":
            return "activations" if self._recomputed(number) else "temporaries"
        return "activations" if born.dead_phase == "backward" else "temporaries"

    def _recomputed(self, number: int) -> bool:
        return False

    def emit(self, segment: Segment, located: tuple[Stack, int] | None, index: int | None) -> None:
        """Append the segment's items as those of original layer `index` (None: outside the layers)."""
        old = segment.layer
        new = f"{located[0].path}.{index}" if located is not None else ""
        template = located is None or index is None or located[0].kept[located[1]] == index

        def rename(path: str) -> str:
            if old and (path == old or path.startswith(old + ".")):
                return new + path[len(old):]
            return path

        for item in segment.items:
            if isinstance(item, RawMark):
                nbytes, key = 0, (-1, -1)
                if item.storage >= 0:
                    nbytes, key = self.recorder.storages[item.storage].nbytes, self._key(item.storage, located, index)
                self.items.append(Mark(item.kind, rename(item.name), item.phase, nbytes, key))
                continue
            born = self.recorder.storages[item.storage]
            if item.sign < 0 and not template and self.place[born.segment] is None:
                continue  # it is shared by all layers and dies once
            for key in self._keys(item, located, index):
                self.items.append(Memory(item.sign * born.nbytes, self.category(item.storage), rename(born.module),
                                         item.phase, *key))

    def _keys(self, item: RawMemory, located: tuple[Stack, int] | None, index: int | None) -> list[tuple[int, int]]:
        """Storages of the whole model that the event stands for: what dies between the layers dies for each of them."""
        born = self.recorder.storages[item.storage]
        birth_at = self.place[born.segment]
        if located is None and birth_at is not None:
            stack, position = birth_at
            return [(self.base[stack.path] + i, born.ordinal) for i, like in enumerate(stack.stands_for) if like == position]
        return [self._key(item.storage, located, index)]

    def _key(self, number: int, located: tuple[Stack, int] | None, index: int | None) -> tuple[int, int]:
        born = self.recorder.storages[number]
        birth_at = self.place[born.segment]
        if birth_at is None:
            return -1, number
        return self._birth(birth_at, located, index), born.ordinal

    def _birth(self, birth_at: tuple[Stack, int], located: tuple[Stack, int] | None, index: int | None) -> int:
        stack, position = birth_at
        if located is None or index is None or located[0].path != stack.path:
            return self.base[stack.path] + stack.kept[position]
        return self.base[stack.path] + index + (position - located[1])

    def run(self) -> list[Item]:
        segments = self.recorder.segments
        at = 0
        while at < len(segments):
            located = self.place[at]
            if located is None or len(located[0].kept) == located[0].depth:
                self.emit(segments[at], located, located[0].kept[located[1]] if located else None)
                at += 1
                continue
            at = self._run_stack(located[0], at)
        return self.items

    def _run_stack(self, stack: Stack, start: int) -> int:
        """Emit all layers of one pass over a stack; returns the segment after it."""
        segments = self.recorder.segments
        backward = segments[start].backward
        end = start
        for i in range(start, len(segments)):
            if segments[i].backward != backward:
                break
            place = self.place[i]
            if place is not None and place[0] is stack:
                end = i + 1
        by_position: dict[int, list[int]] = defaultdict(list)
        last = self.place[start]
        for i in range(start, end):
            last = self.place[i] or last
            by_position[last[1]].append(i)  # type: ignore[index]
        order = range(stack.depth - 1, -1, -1) if backward else range(stack.depth)
        for index in order:
            for i in by_position[stack.stands_for[index]]:
                place = self.place[i]
                self.emit(segments[i], place, index if place is not None else None)
        return end


def _multiplicity(built: BuiltModel) -> dict[str, list[tuple[str, int]]]:
    """For each kept layer path: the (path, index) of the original layers that it stands for."""
    table: dict[str, list[tuple[str, int]]] = {}
    for stack in built.stacks:
        for position in range(len(stack.kept)):
            table[f"{stack.path}.{position}"] = [
                (f"{stack.path}.{i}", i) for i, like in enumerate(stack.stands_for) if like == position
            ]
    return table


def _split(path: str, table: dict[str, Any]) -> tuple[str, str]:
    """(layer path, rest) of a module or parameter path; ("", path) outside the layers."""
    head = path
    while head:
        if head in table:
            return head, path[len(head):]
        head = head.rpartition(".")[0]
    return "", path


def _names(paths: list[str], built: BuiltModel) -> list[tuple[str, str]]:
    """(name in the whole model, name in the cut model), in the order of the whole model."""
    table = _multiplicity(built)
    stacks = {stack.path: stack for stack in built.stacks}
    out: list[tuple[str, str]] = []
    done: set[str] = set()
    for path in paths:
        layer, _ = _split(path, table)
        if not layer:
            out.append((path, path))
            continue
        stack_path = layer.rpartition(".")[0]
        if stack_path in done:
            continue
        done.add(stack_path)
        stack = stacks[stack_path]
        inside: dict[int, list[str]] = defaultdict(list)
        for other in paths:
            other_layer, rest = _split(other, table)
            if other_layer and other_layer.rpartition(".")[0] == stack_path:
                inside[int(other_layer.rpartition(".")[2])].append(rest)
        for index, position in enumerate(stack.stands_for):
            out += [(f"{stack_path}.{index}{rest}", f"{stack_path}.{position}{rest}") for rest in inside[position]]
    return out


def _renamed(paths: set[str], built: BuiltModel) -> frozenset[str]:
    """Module paths of the cut model as those of the whole one."""
    table = _multiplicity(built)
    out: set[str] = set()
    for path in paths:
        layer, rest = _split(path, table)
        out.update(f"{original}{rest}" for original, _ in table[layer]) if layer else out.add(path)
    return frozenset(out)


def _parameters(built: BuiltModel, itemsizes: dict[str, int]) -> tuple[ParameterInfo, ...]:
    cut = dict(built.model.named_parameters())
    holders: dict[int, list[str]] = defaultdict(list)
    for path, module in built.model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and path not in holders[id(parameter)]:
                holders[id(parameter)].append(path)
    infos = []
    for name, source in _names(list(cut), built):
        parameter = cut[source]
        prefix_old = source.rpartition(".")[0]
        prefix_new = name.rpartition(".")[0]
        modules = tuple(prefix_new if path == prefix_old else path for path in holders[id(parameter)])
        mine = local(parameter)
        infos.append(ParameterInfo(name, mine.numel(), tuple(mine.shape), itemsizes[source], parameter.requires_grad,
                                   parameter.is_floating_point(), modules, parameter.numel()))
    return tuple(infos)


def _operations(built: BuiltModel, recorder: Recorder) -> tuple[Operation, ...]:
    table = _multiplicity(built)
    counts: dict[tuple[Any, ...], list[int]] = {}
    for (segment, phase, kind, flops, moved, shape, itemsize), count in recorder.operations.items():
        layer = recorder.segments[segment].layer
        times = len(table[layer]) if layer else 1
        slot = counts.setdefault((phase, kind, flops, moved, shape, itemsize), [0, 0])
        slot[0] += count * times
        slot[1] += count * times if layer else 0
    return tuple(Operation(p, k, f, m, s, i, c, inner) for (p, k, f, m, s, i), (c, inner) in counts.items())


def expand(built: BuiltModel, recorder: Recorder, workload: Workload, itemsizes: dict[str, int]) -> ModelTrace:
    """The trace of the whole model from what was recorded of the cut one."""
    model = built.model
    paths = {id(module): path for path, module in model.named_modules()}

    def path_of(getter: str) -> str:
        module = getattr(model, getter)() if hasattr(model, getter) else None
        return paths.get(id(module), "") if module is not None else ""

    buffers = {name: buffer.untyped_storage().nbytes() for name, buffer in model.named_buffers()}
    parts = [(name, buffers[source]) for name, source in _names(list(buffers), built)]
    owners = [path for path, module in model.named_modules() if any(p is not None for p in module._parameters.values())]
    config = built.config
    tokens = workload.micro_batch * workload.seq_len
    return ModelTrace(
        items=_Expander(built, recorder).run(),
        parameters=_parameters(built, itemsizes),
        batch=tokens * 8 + (workload.micro_batch * 8 if built.kind == "sequence-classification" else 0),
        layer_paths=tuple(f"{stack.path}.{i}" for stack in built.stacks for i in range(stack.depth)),
        layer_class=built.block_classes[0] if built.block_classes else "",
        block_classes=built.block_classes,
        module_order=tuple(name for name, _ in _names(owners, built)),
        input_embedding=path_of("get_input_embeddings"),
        output_embedding=path_of("get_output_embeddings"),
        final_norm=_final_norm(model, paths),
        hidden_size=int(getattr(config, "hidden_size", 0) or 0),
        vocab_size=int(getattr(config, "vocab_size", 0) or 0),
        kind=built.kind,
        architecture=type(model).__name__,
        inputs_without_gradient=_renamed(recorder.inputs_without_gradient, built),
        entries_without_gradient=_renamed(recorder.entries_without_gradient, built),
        operations=_operations(built, recorder),
        compiled=sum(map(code_size, recorder.compiled)),
        compiled_in_backward=sum(code_size(product) for product, phase in recorder.compiled.items() if phase == "backward"),
        notes=_notes(built, workload),
        buffer_parts=tuple(parts),
    )


def _notes(built: BuiltModel, workload: Workload) -> tuple[str, ...]:
    """What of the workload the model could not have, and what it may have beside it."""
    notes = []
    used = getattr(built.config, "_attn_implementation", None)
    if used == "eager" and workload.attention != "eager":
        notes.append(f"{type(built.model).__name__} has no {workload.attention} attention in transformers: eager is estimated")
    classes = {type(module).__name__ for module in built.model.modules()}
    if scanning := sorted(name for name in classes if name.endswith(("Mixer", "GatedDeltaNet"))):
        notes.append(f"{scanning[0]} is estimated as transformers computes it without kernels of its own; those of mamba-ssm, "
                     "causal-conv1d or flash-linear-attention, where they are installed, need much less on a GPU")
    return tuple(notes)


def _final_norm(model: Any, paths: dict[int, str]) -> str:
    """The last normalisation among the direct children of the base model, where Accelerate looks for it."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    found = ""
    for _, child in base.named_children() if base is not None else ():
        if "Norm" in type(child).__name__:
            found = paths[id(child)]
    return found
