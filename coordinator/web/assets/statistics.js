// The statistics of an answer: a name, a value, and what it means in words. Definitions: docs/statistics.md.
import { count, milliseconds, rate, share } from "./format.js";

// [name, value, words] of a `finished` event; `seed` is the one used.
export function statisticsOf({ usage, timing, speculation, finish_reason: reason }, seed) {
  const rows = [
    [
      "answer",
      `${count(usage.completion_tokens, "token")} in ${milliseconds(timing.total_ms)} (${reason})`,
      reason === "length" ? "Ended at the number of tokens allowed." : "Ended by itself, or at a stop text.",
    ],
    ["first token", milliseconds(timing.ttft_ms), "From the arrival of the question to the first tokens."],
  ];
  if (timing.tpot_ms) {
    rows.push(["speed", `${rate(1000 / timing.tpot_ms)} tokens/s`, "After the first tokens came."]);
  }
  rows.push(["mode", speculation.mode, "How the answer was speculated for. off: nothing was drafted."]);
  rows.push(...roundRows(speculation));
  if (speculation.drafted_tokens) rows.push(...draftRows(usage, speculation));
  rows.push(["seed", seed, "Ask with it again to get the same answer (rule coupled)."]);
  return rows;
}

function roundRows(stats) {
  if (stats.mean_acceptance_length == null) return [];
  const value = `${stats.rounds}, ${stats.mean_acceptance_length.toFixed(2)} tokens each`;
  return [["rounds", value, "Target steps for this answer, and the tokens that each gave. Plain decoding gives 1."]];
}

function draftRows(usage, stats) {
  const rows = [
    [
      "from drafts",
      `${stats.accepted_tokens} of ${usage.completion_tokens}`,
      "Tokens that were guessed ahead and confirmed by the target. The others are the target's own.",
    ],
  ];
  if (stats.acceptance_rate != null) {
    rows.push([
      "acceptance rate",
      share(stats.acceptance_rate),
      "How often the drafter's first guess was right, where it was checked.",
    ]);
  }
  if (stats.hit_rate != null) {
    const looked = stats.lookup_rate ? `, ${share(stats.lookup_rate)} looked up` : "";
    rows.push([
      "hit rate",
      `${share(stats.hit_rate)}${looked}`,
      "Rounds that found a draft to check. Looked up: found in the text itself by the target worker.",
    ]);
  }
  rows.push([
    "drafting",
    `${milliseconds(stats.draft_ms)}, ${milliseconds(stats.exposed_draft_ms)} exposed`,
    "Time spent drafting, and the part of it that the target waited for. The rest was hidden behind its own steps.",
  ]);
  return rows;
}
