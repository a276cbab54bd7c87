"""A step that takes far longer than steps do is spoken of, with the rank and what it is doing."""

from __future__ import annotations

import threading
import time
from typing import Any

from toolkit.training.heartbeat import Heartbeat, place_of, stack_of


def stuck(release: threading.Event) -> None:
    release.wait(20)


def test_a_line_names_the_rank_the_step_and_the_place() -> None:
    said: list[str] = []
    release, heard = threading.Event(), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        release.set()
        heard.set()

    with Heartbeat(1, 2, least=0.05, poll=0.02, say=say) as heartbeat:
        for step in range(1, 4):
            heartbeat.beat(step, 0.001)
        stuck(release)
    assert heard.wait(1)
    assert said[0].startswith("[rank 1 of 2] step 4 has taken") and "times the median" in said[0]
    assert "threading.py" in said[0]


def test_lines_come_at_ten_times_the_median_and_then_at_double_times() -> None:
    heartbeat = Heartbeat(least=1.0)
    for step in range(1, 6):
        heartbeat.beat(step, 2.0)
    begun = heartbeat._since
    due = [second for second in range(1, 200) if heartbeat.look(begun + second)]
    assert due == [20, 40, 80, 160]
    heartbeat.beat(6, 2.0)
    assert heartbeat.look(heartbeat._since + 19) is None


def test_quick_steps_and_the_first_one_have_limits_of_their_own() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat()
    assert heartbeat.look(heartbeat._since + 299) is None
    assert "no step has ended yet" in str(heartbeat.look(heartbeat._since + 301))
    heartbeat.beat(1, 0.001)
    assert heartbeat.look(heartbeat._since + 29) is None and heartbeat.look(heartbeat._since + 31)


def test_no_thread_is_left(accelerator: Any) -> None:
    with Heartbeat(poll=0.01):
        time.sleep(0.03)
    assert all(thread.name != "heartbeat" for thread in threading.enumerate())


def frame_in(file: str, function: str, inner: Any) -> Any:
    """What `inner` gives when it is called from a function of this name in a file of this name."""
    scope: dict[str, Any] = {"inner": inner}
    exec(compile(f"def {function}():\n    return inner()", file, "exec"), scope)
    return scope[function]()


def test_the_phase_is_the_outermost_that_is_known_and_waiting_is_told() -> None:
    def here() -> str:
        return str(place_of(stack_of(threading.get_ident())[:-1]))

    assert frame_in("/x/accelerate/accelerator.py", "backward", here).startswith("in backward (test_heartbeat.py:")
    waiting = frame_in("/x/toolkit/training/step.py", "count_batch",
                       lambda: frame_in("/x/torch/distributed/distributed_c10d.py", "all_reduce", here))
    assert waiting.startswith("in counting the batch, waiting for the other ranks in all_reduce (")
    nested = frame_in("/x/step.py", "evaluate", lambda: frame_in("/x/torch/nn/modules/module.py", "_call_impl", here))
    assert nested.startswith("in evaluation")
    assert here().startswith("in ")
