"""One self-contained HTML page about a recommendation, an estimate or a run: nothing is fetched, everything is on it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.profiling.compare import difference, terms
from toolkit.report.pictures import Series, bars, lines, nice_top, table, timeline
from toolkit.report.source import SPLIT, Source, extras, read_source, speed_of, take
from toolkit.report.style import COLOURS, CSS, JS, NAMES
from toolkit.units import format_count, format_size

if TYPE_CHECKING:
    from toolkit.planner.recommendation import Recommendation

AT_ONCE = SPLIT
"""Plans that are shown; the others stand in the table."""
STEPS_SHOWN = 400


def write_page(path: Path, target: Path) -> Source:
    """Read `path`, write the page about it to `target`, and return what was read.

    Raises:
        UserError: nothing to show, or the page can't be written.
    """
    from toolkit.strategies.base import write_whole

    if target.is_dir():
        raise UserError(f"--html {target}: it is a folder; name a file")
    source = read_source(path)
    try:
        write_whole(target, page(source))
    except OSError as error:
        raise UserError(f"--html {target}: {error.strerror or error}") from None
    return source


def add_page(result: Recommendation, folder: Path) -> tuple[Recommendation, dict[str, Any]]:
    """Put report.html into a folder of `recommend --write`, and what the page was made from into its recommendation.json.

    Returns the recommendation with that file among its files, and the JSON as it was written.

    Raises:
        UserError: the folder can't be written.
    """
    from toolkit.strategies.base import write_whole

    target = folder / "report.html"
    result = replace(result, files=[*result.files, str(target)])
    content = result.to_json()
    content |= extras(result.request.model, content["recommended"], split=content["candidates"])
    source = Source(folder.name)
    take(source, content)
    try:
        write_whole(target, page(source))
        write_whole(folder / "recommendation.json", json.dumps(content, indent=1))
    except OSError as error:
        raise UserError(f"--write {folder}: {error.strerror or error}") from None
    return result, content


def page(source: Source) -> str:
    """The page's text."""
    title, lead = _headline(source)
    parts = [(_failed, "failed", "Out of memory"), (_plans, "plans", "Memory by plan"), (_profile, "profile", "Memory by rank"),
             (_timeline, "time", "Two steps, allocation by allocation"), (_measured, "measured", "Predicted and measured"),
             (_peaks, "peaks", "Peak of each step"), (_scaling, "scaling", "Throughput from one GPU to many"),
             (_commands, "commands", "How to run it"), (_notes, "notes", "Left out")]
    sections = [(_part(source, make, heading), name, heading) for make, name, heading in parts]
    body = "".join(f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{content}</section>'
                   for content, name, heading in sections if content)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f'<title>{escape(title)}</title><style>{CSS}</style></head><body><a class="skip" href="#content">To the content</a>'
        f'<header><h1>{escape(title)}</h1>{lead}</header><main id="content">{body}</main><script>{JS}</script></body></html>\n')


def _part(source: Source, make: Callable[[Source], str], heading: str) -> str:
    """A section, or nothing and a note: what a file of another version lacks must not cost the rest of the page."""
    try:
        return make(source)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        source.notes.append(f"{heading}: its data can't be read ({type(error).__name__}: {error}); was it written by another "
                            "version?")
        return ""


def _headline(source: Source) -> tuple[str, str]:
    estimate = source.estimate
    if estimate is None:
        label = (source.plan or {}).get("label")
        model = source.run.get("model")
        command = (source.profile or {}).get("command")
        title = f"{model} under {label}" if model and label else str(label or (shlex.join(command) if command else source.name))
        return title, f'<p class="dim">{escape(source.name)}</p>'
    model, work, cluster = estimate["model"], estimate["workload"], estimate["cluster"]
    on = f"{cluster['world_size']} x {cluster['gpu']['name']}"
    title = f"{model['name']} on {on}"
    facts = (f"{format_count(model['parameters'])} parameters, {work['method']}, {work['precision']}, {work['micro_batch']} x "
             f"{work['seq_len']} tokens{' x ' + str(work['accumulate']) if work['accumulate'] > 1 else ''}, {work['optimizer']}")
    lead = f'<p class="dim">{escape(facts)}</p>'
    said = source.recommendation
    if said is not None:
        style = "good" if said["recommended"] else "bad"
        lead += f'<p>{escape(said["one_gpu"])}</p><p class="{style}">{escape(said["reason"])}.</p>'
        tries = [f"{c['what']} ({c['option']}): " + ("fits" if c["fits"] else f"still {format_size(c['short'])} short")
                 for c in said.get("changes", [])]
        return title, lead + (f"<ul>{''.join(f'<li>{escape(t)}</li>' for t in tries)}</ul>" if tries else "")
    memory = estimate["memory"]
    total, capacity = format_size(memory["peak_total"]), format_size(memory["capacity"])
    return title, lead + (f'<p class="good">It fits: {total} of {capacity}.</p>' if memory["fits"] else
                          f'<p class="bad">It does not fit: {total} of {capacity}.</p>')


def _candidates(source: Source) -> list[dict[str, Any]]:
    if source.recommendation is None:
        return [source.estimate] if source.estimate else []
    return [c for c in source.recommendation["candidates"] if c and c.get("memory")]


def _entry(candidate: dict[str, Any], source: Source) -> dict[str, Any]:
    world = candidate["cluster"]["world_size"]
    unit = "GPU" if world == 1 else "GPUs"
    name = candidate.get("name") or candidate["plan"]["label"]
    fits = bool(candidate.get("fits_with_margin", candidate["memory"]["fits"]))
    return {"name": f"{name}, {world} {unit}", "memory": candidate["memory"], "fits": fits,
            "note": candidate.get("why") or ("fits" if fits else "does not fit"),
            "chosen": source.recommendation is not None and candidate == source.recommendation["recommended"]}


def _plans(source: Source) -> str:
    found = [_entry(c, source) for c in _candidates(source)]
    if not found or source.estimate is None:
        return ""
    chosen = next((i for i, plan in enumerate(found) if plan["chosen"]), 0)
    shown = found[:AT_ONCE] if chosen < AT_ONCE else [*found[: AT_ONCE - 1], found[chosen]]
    capacity = source.estimate["memory"]["capacity"]
    rows = []
    for plan, candidate in zip(found, _candidates(source), strict=True):
        memory, time = plan["memory"], candidate.get("time") or {}
        speed = time.get("tokens_per_second")
        rows.append([plan["name"], format_size(memory["peak_total"]), format_size(memory["resident"]),
                     *(format_size(memory["breakdown"][c]) for c in memory["breakdown"]),
                     format_count(speed) if speed else "-", plan["note"]])
    names = [NAMES[c] for c in found[0]["memory"]["breakdown"]]
    every = table("Every plan, in figures", ["plan", "peak", "between steps", *names, "tokens/s", "verdict"], rows)
    more = f" The first {len(shown)} of {len(found)}, lightest first; the table has all." if len(shown) < len(found) else ""
    return (f'<p class="dim">The dashed line is the device\'s {format_size(capacity)}.{more}</p>{bars(shown, capacity)}'
            f"<details><summary>As a table</summary>{every}</details>")


def _timeline(source: Source) -> str:
    if not source.timeline or not source.timeline.get("level"):
        return ""
    memory = (source.estimate or {}).get("memory") or (source.memory or {}).get("predicted") or {}
    limit = memory["capacity"] - memory["outside_allocator"] if "capacity" in memory else None
    return timeline(source.timeline, limit)


def _measured(source: Source) -> str:
    if source.memory is None:
        return ""
    rows = []
    measured = source.memory.get("measured") or {}
    for term, claim, truth in terms(source.memory.get("predicted"), measured):
        rows.append([term, format_size(claim), format_size(truth), format_size(claim - truth), difference((term, claim, truth))])
    by_phase = [[phase, format_size(size)] for phase, size in (measured.get("peak_by_phase") or {}).items()]
    by_rank = [[f"rank {i}", format_size(v)] for i, v in enumerate(measured.get("peak_by_rank") or [])]
    head = ["term", "predicted", "measured", "difference", "share"]
    out = table("Per rank, the worst rank's figures", head, rows) if rows else ""
    if by_phase:
        out += table("Measured peak by phase", ["phase", "peak"], by_phase)
    if len(by_rank) > 1:
        out += table("Peak by rank", ["rank", "peak"], by_rank)
    out += _by_phase((measured.get("worst") or {}).get("by_phase") or {})
    kind = {"cuda": "the CUDA allocator's own count", "allocations": "every tensor allocation, counted",
            "rss": "the resident set of the process, which holds the libraries too"}.get(measured.get("counter", ""))
    return out + (f'<p class="dim">Measured is {kind}.</p>' if kind else "")


def _by_phase(found: dict[str, dict[str, int]]) -> str:
    """What was alive at the highest point of each phase of the recorded step."""
    names = [name for name in next(iter(found.values()), {}) if any(split.get(name) for split in found.values())]
    rows = [[name.replace("_", " "), *(format_size(split.get(name, 0)) for split in found.values())] for name in names]
    return table("The recorded step, at the highest point of each phase", ["category", *found], rows) if rows else ""


def _failed(source: Source) -> str:
    found = source.failed
    if found is None:
        return ""
    names = [("asked for", "asked"), ("tensors", "allocated"), ("reserved by the allocator", "reserved"),
             ("of it unused", "fragmentation"), ("outside", "outside"), ("capacity", "capacity")]
    rows = [[name, format_size(found[key])] for name, key in names if found.get(key) is not None]
    rows += [[name, format_size(size)] for name, size in (found.get("groups") or [])]
    where = f"Rank {found.get('rank', 0)}, {found.get('where', '')}" + (f", {found['module']}" if found.get("module") else "")
    alive = table("When the allocation failed, and what was alive", ["what", "size"], rows)
    return f'<p class="bad">{escape(where)}.</p>{alive}'


def _profile(source: Source) -> str:
    ranks = (source.profile or {}).get("ranks") or []
    if not ranks:
        return ""
    rows = [[f"rank {r['rank']}", f"{r['steps']:,}", format_size(r["peak"]), format_size(r["first_step_peak"]),
             format_size(r["resident"])] for r in ranks]
    return table("Per rank, the worst first", ["rank", "steps", "peak", "first step", "after a step"], rows)


def _peaks(source: Source) -> str:
    points = [(float(r["step"]), float(r["memory_peak"])) for r in source.steps if r.get("memory_peak")]
    if not points and source.profile and source.profile.get("ranks"):
        points = [(float(i), float(peak)) for i, peak in enumerate(source.profile["ranks"][0]["peaks"], 1)]
    if len(points) < 2:
        return ""
    every = -(-len(points) // STEPS_SHOWN)
    points = [max(points[i : i + every], key=lambda p: p[1]) for i in range(0, len(points), every)]
    series: list[Series] = [("measured", COLOURS["parameters"], points)]
    claim = ((source.memory or {}).get("predicted") or {}).get("peak_allocated")
    highest = max(p[1] for p in points)
    label = f"Measured peak of {len(points)} steps, at most {format_size(highest)}"
    if claim:
        series.append(("predicted", COLOURS["gradients"], [(points[0][0], float(claim)), (points[-1][0], float(claim))]))
        label += f"; predicted {format_size(claim)}"
    return lines(label, series, x=lambda v: f"step {v:g}", y=format_size, top=nice_top(max(highest, claim or 0) * 1.02),
                 dashed=("predicted",))


def _scaling(source: Source) -> str:
    series: list[Series] = []
    said, rows = [], []
    for curve in source.curves:
        points = [(float(p["gpus"]), speed_of(p)) for p in curve.get("points", []) if speed_of(p) > 0]
        if len(points) < 2:
            continue
        colour = COLOURS["parameters"] if curve["mode"] == "weak" else COLOURS["gradients"]
        first = points[0]
        series += [(f"{curve['mode']} scaling", colour, points),
                   (f"ideal ({curve['mode']})", COLOURS["rounding"], [(n, first[1] * n / first[0]) for n, _ in points])]
        knee, over = curve.get("knee"), curve.get("communication_overtakes_at")
        said.append(f"{curve['mode']}: " + (f"after {knee} GPUs another doubling pays less than it should" if knee else
                                            "every doubling pays")
                    + (f"; communication takes more than half of the step from {over} GPUs on" if over else ""))
        rows += [[curve["mode"], f"{p['gpus']}", format_count(speed_of(p)), f"{p['efficiency']:.0%}", p["bound"]]
                 for p in curve["points"]]
    if not series:
        return ""
    label = "Tokens per second over the number of GPUs. " + ". ".join(said)
    picture = lines(label, series, x=lambda v: f"{v:g}", y=format_count, top=0, logs=True,
                    dashed=[name for name, _, _ in series if name.startswith("ideal")])
    every = table("The curve in figures", ["scaling", "GPUs", "tokens/s", "efficiency", "bound by"], rows)
    return (f'<p>{escape(". ".join(said))}.</p><p class="dim">Tokens per second over GPUs.</p>{picture}'
            f"<details><summary>As a table</summary>{every}</details>")


def _commands(source: Source) -> str:
    files = [Path(name) for name in (source.recommendation or {}).get("files", [])]
    places = {file.name: file for file in files}
    commands = []
    if "launch.sh" in places:
        launch, train = (shlex.quote(str(places[name])) for name in ("accelerate.yaml", "train.yaml"))
        commands = [f"sh {shlex.quote(str(places['launch.sh']))}",
                    f"accelerate launch --config_file {launch} recipes/train.py --config {train}"]
    elif source.recommendation and source.recommendation.get("recommended"):
        return "<p>toolkit recommend with <code>--write DIR</code> writes the files and the commands that launch this plan.</p>"
    blocks = "".join(f'<pre tabindex="0" id="command-{i}">{escape(command)}</pre><p><button type="button" '
                     f'data-copy="command-{i}">Copy</button></p>' for i, command in enumerate(commands))
    listed = "".join(f"<li>{escape(str(file))}</li>" for file in files)
    return blocks + (f"<details><summary>Files</summary><ul>{listed}</ul></details>" if files else "")


def _notes(source: Source) -> str:
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in source.notes)}</ul>" if source.notes else ""
