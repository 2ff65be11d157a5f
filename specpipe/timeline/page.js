// Zooms, scrolls, and shows what a bar has to say. Bars are there without it.
const scroll = document.querySelector(".scroll");
const plot = document.querySelector(".plot");
const slider = document.querySelector("#zoom");
const output = document.querySelector("output");
const view = document.querySelector(".view");
const all = document.querySelector(".all");
const links = document.querySelector(".links");
const LEFT = 100;
const length = Number(plot.style.getPropertyValue("--length"));
const typical = Number(plot.dataset.typical);
let scale = Number(plot.style.getPropertyValue("--scale"));
let chosen = null;
const placed = [...plot.querySelectorAll(".part, .mark")].map((element) => {
  const [at, size] = ["--at", "--for"].map((name) => Number(element.style.getPropertyValue(name)));
  return { element, at, size };
});
const bars = [...plot.querySelectorAll(".bar[data-round]")];

// All of it, unless rounds would be too narrow to tell apart: the overview has all of a long answer.
const least = () => Math.max((scroll.clientWidth - LEFT - 20) / length, 2 / typical);
const most = () => Math.max(800 / typical, least() * 2);

function zoom(wanted, x = scroll.clientWidth / 2) {
  const ms = (scroll.scrollLeft + x - LEFT) / scale;
  scale = Math.min(Math.max(wanted, least()), most());
  plot.style.width = `${length * scale + 140}px`;
  for (const { element, at, size } of placed) {
    element.style.left = `${LEFT + at * scale}px`;
    if (size) element.style.width = `${Math.max(size * scale, 1)}px`;
  }
  scroll.scrollLeft = ms * scale + LEFT - x;
  plot.dataset.scale = scale;
  slider.value = (100 * Math.log(scale / least())) / Math.log(most() / least());
  refresh();
}

function refresh() {
  drawTicks();
  drawLinks();
  const width = all.clientWidth - 92;
  const from = Math.max(scroll.scrollLeft, 0) / scale;
  const seen = Math.min((scroll.clientWidth - LEFT) / scale, length - from);
  view.style.left = `${92 + (width * from) / length}px`;
  view.style.width = `${(width * seen) / length}px`;
}

function drawTicks() {
  plot.querySelectorAll(".tick").forEach((tick) => tick.remove());
  const least = 90 / scale;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * 0.999);
  const from = Math.max(Math.floor((scroll.scrollLeft - LEFT) / scale / step), 0);
  const to = Math.min(Math.ceil((scroll.scrollLeft + scroll.clientWidth) / scale / step), Math.floor(length / step));
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let index = from; index <= to; index++) {
    const tick = document.createElement("div");
    tick.className = "tick";
    tick.style.left = `${LEFT + index * step * scale}px`;
    tick.textContent = step >= 1000 ? `${(index * step) / 1000} s` : `${(index * step).toFixed(digits)} ms`;
    plot.append(tick);
  }
}

function linkedTo(bar) {
  if (!bar) return [];
  const own = (bar.dataset.links || "").split(" ").filter(Boolean).map((id) => [document.getElementById(id), bar]);
  const others = bar.id ? [...plot.querySelectorAll(`[data-links~="${bar.id}"]`)].map((other) => [bar, other]) : [];
  return [...own, ...others];
}

function drawLinks() {
  links.replaceChildren();
  const origin = plot.getBoundingClientRect();
  for (const [draft, verify] of linkedTo(chosen)) {
    const a = draft.getBoundingClientRect();
    const b = verify.getBoundingClientRect();
    const [x1, y1, x2, y2] = [a.right - origin.x - 3, a.top - origin.y, b.left - origin.x + 5, b.bottom - origin.y];
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`);
    links.append(path);
  }
}

function choose(bar) {
  if (chosen === bar) return;
  plot.querySelectorAll(".chosen, .linked").forEach((other) => other.classList.remove("chosen", "linked"));
  chosen = bar;
  const pairs = linkedTo(bar);
  plot.classList.toggle("linking", pairs.length > 0);
  bar.classList.add("chosen");
  pairs.flat().forEach((other) => other.classList.add("linked"));
  output.replaceChildren(...bar.title.split("\n").map((line) => {
    const part = document.createElement("span");
    part.textContent = line;
    return part;
  }));
  drawLinks();
}

function show(bar) {
  const [box, seen] = [bar.getBoundingClientRect(), scroll.getBoundingClientRect()];
  if (box.left < seen.left + LEFT || box.right > seen.right) {
    scroll.scrollLeft += box.left - seen.left - scroll.clientWidth / 3;
  }
  choose(bar);
}

function step(by) {
  if (!bars.length) return;
  const now = bars.indexOf(chosen);
  show(bars[Math.min(Math.max(now < 0 ? 0 : now + by, 0), bars.length - 1)]);
}

plot.addEventListener("pointerover", (event) => event.target.closest(".bar") && choose(event.target.closest(".bar")));
scroll.addEventListener("scroll", () => requestAnimationFrame(refresh));
scroll.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(scale * 1.2 ** -Math.sign(event.deltaY), event.clientX - scroll.getBoundingClientRect().x);
}, { passive: false });
document.addEventListener("keydown", (event) => {
  if (event.target === slider) return;
  const action = {
    ArrowRight: () => step(1), ArrowLeft: () => step(-1), "+": () => zoom(scale * 1.5), "-": () => zoom(scale / 1.5),
    0: () => zoom(least()),
  }[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
let frame = 0;
slider.addEventListener("input", () => {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => zoom(least() * (most() / least()) ** (slider.value / 100)));
});
document.querySelector("#whole").addEventListener("click", () => zoom(least()));
document.querySelector("#rounds").addEventListener("click", () => zoom((scroll.clientWidth - LEFT) / (8 * typical)));
function jump(event) {
  const share = (event.clientX - all.getBoundingClientRect().x - 92) / (all.clientWidth - 92);
  scroll.scrollLeft = share * length * scale + LEFT - scroll.clientWidth / 2;
}
all.addEventListener("pointerdown", (event) => {
  jump(event);
  all.setPointerCapture(event.pointerId);
  all.addEventListener("pointermove", jump);
  all.addEventListener("pointerup", () => all.removeEventListener("pointermove", jump), { once: true });
});
document.querySelectorAll("td a").forEach((link) => link.addEventListener("click", (event) => {
  event.preventDefault();
  show(document.querySelector(`.bar[data-round="${link.dataset.round}"]`));
  scroll.scrollIntoView({ block: "nearest" });
  scroll.focus();
}));
window.addEventListener("resize", () => zoom(scale));
document.querySelectorAll("[hidden]").forEach((tool) => (tool.hidden = false));
zoom((scroll.clientWidth - LEFT) / (8 * typical));
scroll.scrollLeft = Number(plot.dataset.first) * scale - 40;
refresh();
