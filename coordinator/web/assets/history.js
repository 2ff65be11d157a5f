// What workers did in the last minute, out of spans. Pure: no clock, no page.
//
// A worker's step has a span for each of its sessions; here it is one bar with a part for each. How a round went is told
// by its own span, a little later than its verification. A draft step is known to have been useful once a verify span is
// linked to it.

const KEEP_MS = 60_000;
const MAX_BARS = 20_000; // of one lane
const MAX_ROUNDS = 50_000;
const KINDS = { "target-worker": "target", "draft-worker": "draft" };
const STEPS = new Set(["verify", "draft", "prefill"]);

export class History {
  constructor() {
    this.lanes = new Map(); // "kind address" -> lane
    this.rounds = []; // by arrival: {at, tokens, accepted, outcome}
    this.lastEnd = 0; // of the newest bar
    this.numDropped = 0;
    this.barOfSpan = new Map();
    this.verifyOfRound = new Map(); // id of a round's span that has not come yet -> part
    this.openLinks = new Map(); // id of a draft span that was verified and has not come yet -> when
  }

  // Lanes in the order of the configuration, also of workers that have done nothing.
  expect(workers) {
    for (const { kind, address } of workers) this.lane(kind, address);
  }

  lane(kind, address) {
    const key = `${kind} ${address}`;
    if (!this.lanes.has(key)) this.lanes.set(key, { key, kind, address, bars: [], byStep: new Map() });
    return this.lanes.get(key);
  }

  orderedLanes() {
    const rank = (lane) => (lane.kind === "target" ? 0 : 1);
    return [...this.lanes.values()].sort((a, b) => rank(a) - rank(b));
  }

  // From the first step that is kept to the end of the last one.
  extent() {
    const starts = [...this.lanes.values()].flatMap(({ bars }) => (bars.length ? [bars[0].start] : []));
    return starts.length ? this.lastEnd - Math.min(...starts) : 0;
  }

  add(spans) {
    for (const span of spans) {
      const kind = KINDS[span.role];
      if (kind && STEPS.has(span.name)) this.addStep(this.lane(kind, span.address), span);
      if (span.name === "round") this.addRound(span);
    }
    this.forget(this.lastEnd - KEEP_MS);
  }

  addStep(lane, span) {
    const { attributes } = span;
    const key = attributes.step ? `${attributes.incarnation ?? ""} ${attributes.step}` : span.id;
    let bar = lane.byStep.get(key);
    if (!bar) {
      bar = { lane, key, start: span.start, end: span.end, name: span.name, exposed: 0, isUsed: false, parts: [] };
      lane.byStep.set(key, bar);
      insertByStart(lane.bars, bar);
    }
    const part = { ...span, outcome: null, tokens: (attributes.num_accepted ?? 0) + 1 };
    bar.parts.push(part);
    bar.exposed = Math.max(bar.exposed, attributes.exposed_ms ?? 0);
    if (span.name === "verify") bar.name = "verify";
    if (this.openLinks.delete(span.id)) bar.isUsed = true;
    this.barOfSpan.set(span.id, bar);
    this.lastEnd = Math.max(this.lastEnd, bar.end);
    if (span.name === "verify") this.addVerification(part);
  }

  addVerification(part) {
    this.verifyOfRound.set(part.parent, part);
    for (const id of part.links) {
      const draft = this.barOfSpan.get(id);
      if (draft) draft.isUsed = true;
      else this.openLinks.set(id, part.end);
    }
  }

  addRound({ id, end, attributes }) {
    const { num_accepted: accepted, num_committed: committed, num_cut: cut = 0, outcome } = attributes;
    if (committed == null) return; // it was lost with its worker
    const round = { at: end, tokens: committed - cut, accepted, outcome };
    const part = this.verifyOfRound.get(id);
    if (part) Object.assign(part, { outcome, tokens: round.tokens });
    this.verifyOfRound.delete(id);
    this.rounds.push(round);
  }

  forget(before) {
    for (const lane of this.lanes.values()) {
      let num = Math.max(0, lane.bars.length - MAX_BARS);
      while (num < lane.bars.length && lane.bars[num].end < before) num++;
      for (const bar of lane.bars.splice(0, num)) {
        lane.byStep.delete(bar.key);
        for (const part of bar.parts) this.barOfSpan.delete(part.id);
      }
    }
    let num = Math.max(0, this.rounds.length - MAX_ROUNDS);
    while (num < this.rounds.length && this.rounds[num].at < before) num++;
    this.rounds.splice(0, num);
    for (const [id, at] of this.openLinks) if (at < before) this.openLinks.delete(id);
    for (const [id, part] of this.verifyOfRound) if (part.end < before) this.verifyOfRound.delete(id);
  }

  linkedBars(bar) {
    const found = new Set();
    for (const part of bar.parts) for (const id of part.links) if (this.barOfSpan.has(id)) found.add(this.barOfSpan.get(id));
    return found;
  }
}

// Bars come nearly in order.
function insertByStart(bars, bar) {
  let at = bars.length;
  while (at > 0 && bars[at - 1].start > bar.start) at--;
  bars.splice(at, 0, bar);
}

export function barsWithin(lane, from, to) {
  const found = [];
  for (let i = lane.bars.length - 1; i >= 0; i--) {
    const bar = lane.bars[i];
    if (bar.start - bar.exposed > to) continue;
    if (bar.end < from - 2_000) break; // no step is longer than this before a shorter one
    if (bar.end >= from) found.push(bar);
  }
  return found.reverse();
}

// Tokens made final in each second that ended within the last `num` seconds before `now`, oldest first.
export function tokensPerSecond(rounds, now, num) {
  const sums = new Array(num).fill(0);
  for (let i = rounds.length - 1; i >= 0; i--) {
    const age = Math.floor((now - rounds[i].at) / 1000);
    if (age > num + 5) break;
    if (age >= 0 && age < num) sums[num - 1 - age] += rounds[i].tokens;
  }
  return sums;
}

// For each depth from 1: the share of rounds with a draft that accepted at least so many tokens of it.
export function acceptanceByDepth(rounds, maxDepth) {
  const reached = new Array(maxDepth + 1).fill(0); // by depth; 0: all rounds with a draft
  for (const { outcome, accepted } of rounds) {
    if (outcome !== "hit" && outcome !== "lookup") continue;
    for (let depth = Math.min(accepted, maxDepth); depth >= 0; depth--) reached[depth]++;
  }
  const [numRounds, ...counts] = reached;
  return { numRounds, shares: counts.map((count) => (numRounds ? count / numRounds : 0)) };
}

// How much of the drafting lay under a target step, and how long targets waited, between two moments.
export function overlapWithin(lanes, from, to) {
  const cut = (bar) => [Math.max(bar.start, from), Math.min(bar.end, to)];
  const targets = lanes.filter((lane) => lane.kind === "target").flatMap((lane) => barsWithin(lane, from, to));
  const verify = union(targets.map(cut));
  let drafting = 0;
  let hidden = 0;
  for (const lane of lanes.filter(({ kind }) => kind === "draft")) {
    const steps = union(barsWithin(lane, from, to).map(cut));
    drafting += total(steps);
    hidden += common(steps, verify);
  }
  return { drafting, hidden, exposed: targets.reduce((sum, bar) => sum + bar.exposed, 0) };
}

function union(intervals) {
  const merged = [];
  for (const [start, end] of intervals.filter(([a, b]) => b > a).sort((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([start, end]);
  }
  return merged;
}

function total(intervals) {
  return intervals.reduce((sum, [start, end]) => sum + end - start, 0);
}

function common(left, right) {
  let sum = 0;
  for (let i = 0, j = 0; i < left.length && j < right.length; ) {
    sum += Math.max(0, Math.min(left[i][1], right[j][1]) - Math.max(left[i][0], right[j][0]));
    if (left[i][1] < right[j][1]) i++;
    else j++;
  }
  return sum;
}
