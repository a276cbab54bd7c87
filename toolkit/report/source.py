"""What a page is made from: a run folder, a folder of `recommend --write`, or the JSON of a subcommand."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from toolkit.errors import UserError
from toolkit.specs import Cluster, ModelSpec, Plan, Workload

SCHEMA = 1
POINTS = 600
SPLIT = 10
"""Plans whose bars are split into terms."""
FILES = ("recommendation.json", "plan.json", "memory.json", "metrics.jsonl", "out_of_memory.json", "profile.json")
"""What is read of a folder; any of them is enough."""
Spec = TypeVar("Spec")


@dataclass
class Source:
    """What there is to show. Sizes in bytes; objects are those of the contract's JSON."""

    name: str
    """The folder or file it was read from."""
    recommendation: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None
    """The plan that the page is about, with its estimate."""
    timeline: dict[str, Any] | None = None
    """See `Estimator.timeline`."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    """A run's memory.json."""
    failed: dict[str, Any] | None = None
    """A run's out_of_memory.json."""
    profile: dict[str, Any] | None = None
    """What `toolkit profile` wrote."""
    plan: dict[str, Any] | None = None
    """The plan as a run's live engine had it."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    """A run's resolved configuration."""
    notes: list[str] = field(default_factory=list)
    """What could not be shown, a sentence each."""


def read_source(path: Path) -> Source:
    """What a page about `path` can show.

    Raises:
        UserError: there is nothing of that name, or nothing in it that a page could show.
    """
    if path.is_dir():
        found = _folder(path)
    elif path.is_file():
        found = Source(path.name)
        take(found, _json(path, path.name))
        _model_beside(found, path.parent)
    else:
        raise UserError(f"report {path}: there is no such file or folder; name a run folder, a folder of recommend --write, or "
                        "a file with the output of --json")
    _complete(found)
    return found


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"report {path}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"report {path}: it is not JSON; {name} must be the output of --json, or part of a run folder") from None
    if not isinstance(content, dict):
        raise UserError(f"report {path}: it holds no object; give the output of recommend, estimate or scaling --json")
    return content


def _folder(path: Path) -> Source:
    found = Source(path.resolve().name)
    present = [name for name in FILES if (path / name).is_file()]
    if not present:
        raise UserError(f"report {path}: it is no run folder and no folder of recommend --write "
                        f"(it has none of {', '.join(FILES)})")
    for name in present:
        try:
            if name == "metrics.jsonl":
                found.steps = _steps(path / name)
            elif name == "recommendation.json":
                take(found, _json(path / name, name))
            elif name == "plan.json":
                found.plan = _json(path / name, name)
            elif name == "out_of_memory.json":
                found.failed = _json(path / name, name)
            elif name == "profile.json":
                found.profile = _json(path / name, name)
            else:
                found.memory = _json(path / name, name)
                if not all(isinstance(found.memory.get(key) or {}, dict) for key in ("predicted", "measured")):
                    found.memory = None
                    raise UserError(f"{path / name}: predicted and measured are no objects; was it written by another version?")
        except UserError as error:
            found.notes.append(str(error).removeprefix("report "))
    _model_beside(found, path)
    return found


def _steps(path: Path) -> list[dict[str, Any]]:
    """The records of optimizer steps; half a line at the end of a killed run is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and "loss" in record:
            records.append(record)
    return records


def take(found: Source, content: dict[str, Any]) -> None:
    """Recognise the JSON of a subcommand by its keys."""
    schema = content.get("schema")
    if schema != SCHEMA:
        raise UserError(f"report {found.name}: schema {schema!r} is of another version; this one reads schema {SCHEMA}")
    if "candidates" in content and "recommended" in content:
        found.recommendation = content
        found.estimate = content["recommended"] or content.get("closest")
    elif "memory" in content and "plan" in content:
        found.estimate = content
    elif "ranks" in content and "command" in content:
        found.profile = content
    elif "curves" in content:
        found.curves = list(content["curves"])
    else:
        raise UserError(f"report {found.name}: it is not the JSON of recommend, estimate, scaling or profile")
    found.timeline = content.get("timeline", found.timeline)
    found.curves = content.get("scaling") or found.curves


def _model_beside(found: Source, folder: Path) -> None:
    """The recipe's configuration that lies beside: it names the model."""
    import yaml

    for name in ("config.yaml", "train.yaml"):
        try:
            values = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(values, dict):
            found.run = values
            return


def _complete(found: Source) -> None:
    """The timeline of what was estimated, made anew when the file holds none and the model is at hand."""
    predicted = (found.memory or {}).get("predicted") or {}
    if found.timeline is None:
        found.timeline = predicted.get("timeline")
    if found.estimate is None or (found.timeline is not None and found.curves):
        return
    spec = _spec(found)
    if spec is None:
        missing = [what for what, there in (("timeline", found.timeline), ("scaling curve", found.curves)) if not there]
        found.notes.append(f"No {' and no '.join(missing)}: the model's config is not at hand.")
        return
    made = extras(spec, found.estimate, split=(found.recommendation or {}).get("candidates", []))
    found.timeline = found.timeline or made.get("timeline")
    found.curves = found.curves or made.get("scaling") or []


def _spec(found: Source) -> ModelSpec | None:
    """The model's config from the catalog or the disk; never from the network."""
    from toolkit.specs.catalog import model as catalog_model
    from toolkit.specs.load import load_model_spec

    named = str(found.run.get("model") or "").removeprefix("config:")
    for name in (named, str((found.estimate or {}).get("model", {}).get("name", ""))):
        if name and (Path(name).exists() or catalog_model(name) is not None):
            try:
                return load_model_spec(name)
            except UserError:
                continue
    return None


def specs_of(estimate: dict[str, Any]) -> tuple[Workload, Plan, Cluster]:
    """The specs that an estimate's JSON was made for. Raises UserError, TypeError or KeyError where it is of another version."""
    return _made(Workload, estimate["workload"]), _made(Plan, estimate["plan"]), _made(Cluster, estimate["cluster"])


def _made(kind: type[Spec], values: dict[str, Any]) -> Spec:
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for spec_field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if spec_field.name in values:
            value, hint = values[spec_field.name], hints[spec_field.name]
            if dataclasses.is_dataclass(hint) and isinstance(value, dict):
                value = _made(hint, value)  # type: ignore[arg-type]
            given[spec_field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def extras(spec: ModelSpec, estimate: dict[str, Any], *, split: list[dict[str, Any]]) -> dict[str, Any]:
    """What a picture needs beside an estimate's JSON: `timeline`, and `scaling` of its plan to eight times as many nodes.

    Candidates in `split` get the terms of their peaks: the search ranks plans by estimates that know the sums only. What
    can't be made (a plan that excludes the cluster, a JSON of another version) is left out.
    """
    from toolkit.estimate.engine import Estimator
    from toolkit.planner.scaling import scaling as curve_of

    made: dict[str, Any] = {}
    estimator = Estimator(spec)
    try:
        work, plan, cluster = specs_of(estimate)
        made["timeline"] = estimator.timeline(work, plan, cluster, points=POINTS)
        for candidate in split[:SPLIT]:
            if candidate.get("memory") and candidate["memory"] != estimate["memory"]:
                memory = estimator.estimate(*specs_of(candidate)).memory
                if memory.peak_allocated == candidate["memory"]["peak_allocated"]:
                    candidate["memory"]["breakdown"] = dict(memory.breakdown)
        if not cluster.gpu.is_cpu and estimate.get("time"):
            node = dataclasses.replace(cluster, gpus_per_node=max(8, cluster.gpus_per_node))
            made["scaling"] = [thin_curve(curve_of(spec, work, plan, node, 8 * node.gpus_per_node, mode="weak").to_json())]
    except (UserError, TypeError, KeyError):
        return made
    return made


def thin_curve(curve: dict[str, Any]) -> dict[str, Any]:
    """A curve of `scaling --json` without the estimate of each point."""
    keys = ("gpus", "nodes", "efficiency", "gain", "bound")
    points = [{**{key: p[key] for key in keys}, "tokens_per_second": speed_of(p)} for p in curve["points"]]
    return {**curve, "points": points}


def speed_of(point: dict[str, Any]) -> float:
    """Tokens per second of a point of a curve, thin or whole; 0 when it has none."""
    return float(point.get("tokens_per_second") or (point.get("time") or {}).get("tokens_per_second") or 0.0)
