"""Speed of off, sync and pipelined on one service, interleaved: `make bench`, or with --target and --draft of your own.

    python -m benchmarks.modes --target DIR --draft DIR --num-prompts 8 --max-tokens 128

Prompts are the first lines of standard library files that the demo pair was not trained on, one at a time. Medians over
prompts; a prompt is asked in every mode before the next one, so that the machine's moods hit all modes alike. Speed and
tokens are compared with the first of --modes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from specpipe import demo
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.launcher import LocalService, ServiceConfig
from specpipe.types import Mode

MODES: Final[dict[str, tuple[Mode, int | None]]] = {
    "off": (Mode.OFF, None),
    **{f"sync-{k}": (Mode.SYNC, k) for k in range(1, 6)},
    "pipelined": (Mode.PIPELINED, None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo.target_folder()))
    parser.add_argument("--draft", default=str(demo.draft_folder()))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), metavar="MODE")
    arguments = parser.parse_args()
    config = ServiceConfig(target=arguments.target, draft=arguments.draft, dtype=arguments.dtype)
    answers = asyncio.run(measure(config, arguments))
    for name, of_mode in answers.items():
        sys.stdout.write(f"{name:<10} {summary(of_mode, answers[arguments.modes[0]])}\n")
    return 0


def prompts(count: int) -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / name for name in demo.held_out_files() if (library / name).is_file()]
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return [text[:600] for text in texts if len(text) > 1200][:count]


async def measure(config: ServiceConfig, arguments: argparse.Namespace) -> dict[str, list[Answer]]:
    """Every prompt in every mode, one request at a time. The first prompt is asked twice and counted once."""
    answers: dict[str, list[Answer]] = {name: [] for name in arguments.modes}
    texts = prompts(arguments.num_prompts)
    async with LocalService(config) as service:
        await service.start()
        async with GenerateClient(service.address) as client:
            for number, text in enumerate([texts[0], *texts]):
                for name in arguments.modes:
                    mode, k = MODES[name]
                    request = GenerateRequest(
                        prompt=text,
                        temperature=arguments.temperature,
                        seed=number,
                        max_tokens=arguments.max_tokens,
                        ignore_eos=True,
                        mode=mode,
                        num_speculative_tokens=k,
                    )
                    answer = await client.answer(request)
                    if number:
                        answers[name].append(answer)
    return answers


def summary(answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
    finished = [answer.finished for answer in answers if answer.finished is not None]
    stats = [one.speculation for one in finished]
    tpot_ms = statistics.median(one.timing.tpot_ms or 0.0 for one in finished)
    plain_ms = statistics.median(one.finished.timing.tpot_ms or 0.0 for one in plain if one.finished)
    decode_ms = sum(one.timing.total_ms - one.timing.ttft_ms for one in finished)
    parts = [
        f"{1000 / tpot_ms:7.1f} tokens/s",
        f"{plain_ms / tpot_ms:5.2f}x the first",
        f"{median(s.mean_acceptance_length for s in stats):5.2f} tokens a round",
        f"acceptance {median(s.acceptance_rate for s in stats):4.2f}",
        f"hits {median(s.hit_rate for s in stats):4.2f} ({median(s.lookup_rate for s in stats):4.2f} lookups)",
        f"exposed {100 * sum(s.exposed_draft_ms for s in stats) / decode_ms:4.1f} %",
        f"step {median(s.target_step_ms for s in stats):5.1f} ms",
        f"draft step {median(s.draft_step_ms for s in stats):5.1f} ms",
        f"gap {median(s.step_gap_ms for s in stats):4.1f} ms",
        f"equal: {sum(a.token_ids == b.token_ids for a, b in zip(answers, plain, strict=True))}/{len(plain)}",
    ]
    return "  ".join(parts)


def median(values: object) -> float:
    known = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return statistics.median(known) if known else float("nan")


if __name__ == "__main__":
    sys.exit(main())
