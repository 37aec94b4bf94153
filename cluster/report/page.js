"use strict";
// Weights come from credit/, computed in Python; here they are only multiplied with the advantage, summed and drawn.
// r is a completion, t a token among all tokens of all completions.

const $ = id => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const form = $("controls");
const PAGE_GROUPS = 8, PAGE_TOKENS = 6000, FIRST_TOKENS = 600;
let A = {};              // the arrays of facts.arrays
let credit, method;      // [P], of the chosen method,
let shuffled = false;    // under the permuted control
let scaleOfAll = 1;
let pages = [[]], page = 0;

/** How the completions of a task are drawn; `pills` where there is nothing of its own.
 *  A renderer adds elements to `box`; tokenElement(r, t) makes one, coloured and with all its keys and details. */
const RENDERERS = {
  pills(box, r, from, to) {
    for (let t = from; t < to; t++) {
      box.append(tokenElement(r, t));
      if (textOf(t).endsWith("⏎")) box.append(make("span", "line"));
    }
  },
  /** One cell of colour a token; the frame within a cell is its credit. */
  glyphs(box, r, from, to) {
    const colours = { ".": "blank", r: "red", g: "green", b: "blue", y: "yellow" };
    box.classList.add("picture");
    for (let t = from; t < to; t++) {
      const element = tokenElement(r, t), text = textOf(t), colour = colours[text];
      element.classList.add("cell", colour ?? "end");
      if (colour) {
        element.textContent = "";
        element.setAttribute("aria-label", `${colour}, credit ${signed(credit[t])}`);
      }
      box.append(element);
      if (text.endsWith("⏎")) box.append(make("span", "line"));
    }
  },
};

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

// ---- unpacking ----

async function unpacked(id) {
  const text = atob($(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  $(id).remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

function halves(bits) {
  const table = new Float32Array(65536);
  for (let i = 0; i < 65536; i++) {
    const exponent = i >> 10 & 31, fraction = i & 1023;
    const size = exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity) : (1 + fraction / 1024) * 2 ** (exponent - 15);
    table[i] = i >> 15 ? -size : size;
  }
  return Float32Array.from(bits, i => table[i]);
}

async function readArrays() {
  const buffer = await unpacked("data");
  const types = { uint8: Uint8Array, int32: Int32Array, uint32: Uint32Array, float32: Float32Array, float16: Uint16Array };
  for (const [name, [type, offset, length]] of Object.entries(facts.arrays)) {
    const values = new types[type](buffer, offset, length);
    A[name] = type === "float16" ? halves(values) : values;
  }
}

// ---- credit ----

const setting = name => form.elements[name]?.value ?? "";
const sign = value => value > 0 ? 1 : value < 0 ? -1 : 0;
const textOf = t => facts.vocabulary[A.token[t]];

/** Where the token's weight is taken from: its own place, or, under the control, another of the completion. */
const sourceOf = (r, t) => shuffled && A.mask[t] ? A.start[r] + A.order[t] : t;

function weightOf(r, t) {
  const value = A["weights_" + method.name][sourceOf(r, t)];
  if (!method.recorded) return value;
  return facts.shaped ? NaN : value / A.advantage[r];
}

function assign() {
  shuffled = form.elements.permuted.checked;
  method = facts.methods.find(one => one.name === setting("method"));
  const values = A["weights_" + method.name];
  credit = new Float32Array(A.token.length);
  for (let r = 0; r < A.reward.length; r++)
    for (let t = A.start[r]; t < A.start[r + 1]; t++)
      if (A.mask[t]) credit[t] = (method.recorded ? 1 : A.advantage[r]) * values[sourceOf(r, t)];
  const stride = Math.max(1, Math.floor(credit.length / 200000));
  const sizes = credit.filter((value, t) => t % stride === 0 && value).map(Math.abs).sort();
  scaleOfAll = sizes[Math.floor(sizes.length * .99)] || 1;
}

function largest(r) {
  let top = 0;
  for (let t = A.start[r]; t < A.start[r + 1]; t++) top = Math.max(top, Math.abs(credit[t]));
  return top;
}

// ---- filters ----

function matches(r) {
  const within = (value, name) =>
    (setting(name + "_from") === "" || value >= +setting(name + "_from")) && (setting(name + "_to") === "" || value <= +setting(name + "_to"));
  if (!within(A.step[r], "step") || !within(A.start[r + 1] - A.start[r], "length")) return false;
  if (setting("reward") && (A.reward[r] >= facts.correct) !== (setting("reward") === "right")) return false;
  if (setting("sign") && sign(A.advantage[r]) !== +setting("sign")) return false;
  if (setting("regime") && A["regime_" + method.name][r] !== +setting("regime")) return false;
  if (setting("prompt") && !facts.prompts[A.group[r]].toLowerCase().includes(setting("prompt").toLowerCase())) return false;
  if (setting("quadrant") && A.quadrant) return A.quadrant.subarray(A.start[r], A.start[r + 1]).includes(+setting("quadrant"));
  return true;
}

function refresh() {
  close();
  const groups = new Map();
  const rows = [];
  for (let r = 0; r < A.reward.length; r++) {
    if (!matches(r)) continue;
    rows.push(r);
    if (!groups.has(A.group[r])) groups.set(A.group[r], []);
    groups.get(A.group[r]).push(r);
  }
  pages = [[]];
  let tokens = 0;
  const newestFirst = [...groups.values()].sort((a, b) => A.step[b[0]] - A.step[a[0]]);
  for (const members of newestFirst) {
    const size = members.reduce((sum, r) => sum + Math.min(FIRST_TOKENS, A.start[r + 1] - A.start[r]), 0);
    if (pages.at(-1).length && (pages.at(-1).length >= PAGE_GROUPS || tokens + size > PAGE_TOKENS)) { pages.push([]); tokens = 0; }
    pages.at(-1).push(members);
    tokens += size;
  }
  page = 0;
  const count = [...form.querySelectorAll(".filters input, .filters select")].filter(field => field.value !== "").length;
  $("active").textContent = count ? `· ${count} in use` : "";
  $("count").textContent = `${rows.length.toLocaleString("en")} of ${A.reward.length.toLocaleString("en")} completions in ${groups.size.toLocaleString("en")} groups`;
  drawPanels(rows);
  drawPage();
}

// ---- where credit goes ----

/** Sum of credit below and above zero, and tokens, by bin; shares of all. */
function shares(rows, bins, binOf) {
  const below = new Float64Array(bins), above = new Float64Array(bins), tokens = new Float64Array(bins);
  for (const r of rows)
    for (let t = A.start[r]; t < A.start[r + 1]; t++) {
      if (!A.mask[t]) continue;
      const bin = binOf(r, t);
      if (bin < 0) continue;
      tokens[bin]++;
      if (credit[t] < 0) below[bin] -= credit[t]; else above[bin] += credit[t];
    }
  const sum = values => values.reduce((a, b) => a + b, 0);
  const mass = sum(below) + sum(above) || 1, count = sum(tokens) || 1;
  return Array.from(tokens, (_, bin) => ({ below: below[bin] / mass, above: above[bin] / mass, tokens: tokens[bin] / count }));
}

const percent = value => (value * 100).toFixed(value && value < .0995 ? 1 : 0) + "\u00a0%";

function barTable(title, names, parts, what) {
  const card = make("div", "card"), table = make("table"), body = make("tbody");
  const heading = make("h3", "", title);
  heading.id = "panel-" + what;
  table.setAttribute("aria-labelledby", heading.id);
  table.append(headRow([what, "", "credit", "tokens"]), body);
  const top = Math.max(1e-9, ...parts.map(part => Math.max(part.below + part.above, part.tokens)));
  names.forEach((name, i) => {
    const part = parts[i];
    if (!part.tokens) return;
    const row = make("tr"), cell = make("td", "bar"), bar = make("div"), mark = make("i", "mark");
    for (const [side, size] of [["neg", part.below], ["pos", part.above]]) {
      const piece = make("span", side);
      piece.style.width = size / top * 100 + "%";
      bar.append(piece);
    }
    mark.style.left = `min(${part.tokens / top * 100}%, 100% - 2px)`;
    bar.append(mark);
    bar.setAttribute("aria-hidden", "true");
    cell.append(bar);
    const label = make("th", "", name);
    label.scope = "row";
    row.append(label, cell, make("td", "", percent(part.below + part.above)), make("td", "faint", percent(part.tokens)));
    body.append(row);
  });
  card.append(heading, table);
  return card;
}

function headRow(names) {
  const head = make("thead"), row = make("tr");
  for (const name of names) {
    const cell = make(name ? "th" : "td", "", name);
    if (name) cell.scope = "col";
    row.append(cell);
  }
  head.append(row);
  return head;
}

function quadrantTable(parts) {
  const card = make("div", "card"), table = make("table", "four"), body = make("tbody");
  const heading = make("h3", "", "Quadrants of outcome and entropy");
  heading.id = "panel-quadrants";
  table.setAttribute("aria-labelledby", heading.id);
  table.append(headRow(["", "positive advantage", "negative advantage"]), body);
  ["high entropy", "low entropy"].forEach((name, low) => {
    const row = make("tr"), label = make("th", "", name);
    label.scope = "row";
    row.append(label);
    for (const negative of [0, 1]) {
      const part = parts[negative * 2 + low], cell = make("td"), share = part.below + part.above;
      cell.append(make("b", "", facts.quadrants[negative * 2 + low]), make("span", "big", percent(share)), make("small", "", "of credit"), make("small", "", percent(part.tokens) + " of tokens"));
      cell.style.background = `color-mix(in srgb, var(--${negative ? "neg" : "pos"}) ${Math.round(share * 100)}%, var(--sunk))`;
      row.append(cell);
    }
    body.append(row);
  });
  card.append(heading, table);
  return card;
}

function drawPanels(rows) {
  const tenths = Array.from({ length: 10 }, (_, i) => `${i * 10}–${i * 10 + 10} %`);
  const position = (r, t) => Math.floor((t - A.start[r]) / (A.start[r + 1] - A.start[r]) * 10);
  const panels = [
    barTable("Position in the completion", tenths, shares(rows, 10, position), "position"),
    barTable("Kind of token", facts.kinds, shares(rows, facts.kinds.length, (r, t) => facts.kindOf[A.token[t]]), "kind"),
  ];
  if (A.entropy_bin) {
    const ends = facts.edges.map(edge => short(+edge.toPrecision(2)));
    const names = Array.from({ length: 10 }, (_, i) => i < 9 ? `below ${ends[i]}` : `from ${ends[8]}`);
    panels.push(barTable("Entropy, in tenths of the tokens", names, shares(rows, 10, (r, t) => A.entropy_bin[t]), "nats"));
  }
  if (A.quadrant) panels.push(quadrantTable(shares(rows, 4, (r, t) => A.quadrant[t] - 1)));
  $("panels").replaceChildren(...panels);
}

// ---- groups and tokens ----

function short(value, digits = 3) {
  if (value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = value === 0 ? "0" : size >= .001 && size < 1e5 ? String(+value.toPrecision(digits)) : value.toExponential(digits - 2);
  return text.replaceAll("-", "−");
}
const signed = value => (value > 0 ? "+" : value < 0 ? "−" : "") + short(Math.abs(value));

function drawPage() {
  close();
  const cards = pages[page].map(groupCard);
  $("groups").replaceChildren(...(cards.length ? cards : [make("p", "card empty", "No completion matches these filters.")]));
  for (const pager of document.querySelectorAll("[data-pager]")) {
    const back = make("button", "quiet", "← Back"), next = make("button", "quiet", "Next →");
    back.type = next.type = "button";
    back.disabled = page === 0;
    next.disabled = page >= pages.length - 1;
    back.onclick = () => turn(-1);
    next.onclick = () => turn(1);
    pager.replaceChildren(back, make("span", "", `page ${page + 1} of ${pages.length}`), next);
  }
}

function turn(by) {
  page += by;
  drawPage();
  $("trajectories-title").scrollIntoView();
}

function groupCard(members) {
  const group = A.group[members[0]], card = make("article", "card group"), header = make("header"), sides = make("div", "sides");
  const heading = make("h3", "", facts.prompts[group]);
  heading.id = "group-" + group;
  card.setAttribute("aria-labelledby", heading.id);
  const rewards = members.map(r => A.reward[r]), mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const where = facts.steps[0] === facts.steps[1] ? "" : `step ${A.step[members[0]]} · `;
  header.append(heading, make("p", "", `${where}group ${facts.labels[group]} · mean reward ${short(mean)}`));
  if (heading.textContent.length > 300) heading.tabIndex = 0;
  const ofGroup = Math.max(...members.map(largest)) || 1;
  sides.append(...members.map(r => completion(r, { completion: largest(r) || 1, group: ofGroup, global: scaleOfAll }[setting("scale")])));
  card.append(header, sides);
  return card;
}

function completion(r, scale) {
  const side = make("div", "side"), line = make("p"), box = make("div", "tokens");
  const direction = sign(A.advantage[r]);
  const advantage = make("span", ["down", "zero", "up"][direction + 1], ["▼ ", "○ ", "▲ "][direction + 1]);
  const length = A.start[r + 1] - A.start[r], gini = A["gini_" + method.name][r];
  line.append(
    make("span", "reward", `reward ${short(A.reward[r])}`),
    advantage,
    make("span", "far", `${length} tokens${A.finish[r] ? ", cut" : ""} · Gini ${Number.isNaN(gini) ? "–" : gini.toFixed(2)}`),
  );
  advantage.append(make("span", "unseen", "advantage "), signed(A.advantage[r]));
  side.dataset.scale = scale;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `Completion ${A.index[r]}, reward ${short(A.reward[r])}, advantage ${signed(A.advantage[r])}`);
  side.append(line, box);
  const renderer = RENDERERS[facts.task] ?? RENDERERS.pills;
  const end = Math.min(A.start[r + 1], A.start[r] + FIRST_TOKENS);
  renderer(box, r, A.start[r], end);
  paint(box, scale);
  const first = box.querySelector(".t");
  if (first) first.tabIndex = 0;
  if (end < A.start[r + 1]) {
    const more = make("button", "quiet more", `Show the other ${A.start[r + 1] - end} tokens`);
    more.type = "button";
    more.onclick = () => { renderer(box, r, end, A.start[r + 1]); paint(box, scale); more.remove(); };
    side.append(more);
  }
  return side;
}

/** A token of the policy is a button; what an environment said is plain text. */
function tokenElement(r, t) {
  if (!A.mask[t]) return make("span", "t other", textOf(t));
  const element = make("button", "t", textOf(t));
  element.type = "button";
  element.tabIndex = -1;
  element.dataset.r = r;
  element.dataset.t = t;
  element.setAttribute("aria-label", `${textOf(t)}, credit ${signed(credit[t])}`);
  if (facts.kinds[facts.kindOf[A.token[t]]] === "special") element.classList.add("special");
  return element;
}

function paint(box, scale) {
  const quadrant = +setting("quadrant");
  for (const element of box.querySelectorAll("button.t")) {
    const value = credit[element.dataset.t];
    element.classList.toggle("pos", value > 0);
    element.classList.toggle("neg", value < 0);
    element.classList.toggle("out", quadrant > 0 && A.quadrant[element.dataset.t] !== quadrant);
    element.style.setProperty("--a", Math.min(1, Math.abs(value) / scale).toFixed(3));
  }
}

// ---- the inspector ----

let pinned = null, shown = null;

function open(element) {
  const box = $("inspector"), r = +element.dataset.r, t = +element.dataset.t;
  if (shown && shown !== element) shown.removeAttribute("aria-describedby");
  shown = element;
  const head = make("p"), list = make("dl");
  head.append(make("span", "token", textOf(t)), make("span", "", `${facts.kinds[facts.kindOf[A.token[t]]]} · ${t - A.start[r] + 1} of ${A.start[r + 1] - A.start[r]}`));
  head.firstChild.style.color = "var(--ink)";
  const add = (name, value) => list.append(make("dt", "", name), make("dd", "", value));
  add("credit", signed(credit[t]));
  add("weight", short(weightOf(r, t)));
  add("advantage", signed(A.advantage[r]));
  if (A.quadrant?.[t]) add("quadrant", facts.quadrants[A.quadrant[t] - 1]);
  list.append(make("dd", "rule"));
  const names = { logprobs: "log-prob, sampler", signal_logp: "log-prob, learner", signal_logp_base: "log-prob, base", signal_logp_negative: "log-prob, negative prompt", signal_entropy: "entropy", signal_residual: "residual" };
  for (const name of new Set([...Object.keys(names), ...Object.keys(A).filter(key => key.startsWith("signal_"))]))
    if (A[name]) add(names[name] ?? name.slice(7).replaceAll("_", " "), short(A[name][t], name.includes("logp") ? 6 : 3));
  list.append(make("dd", "rule"));
  if (A.version[r] >= 0) add("version", "v" + A.version[r]);
  if (facts.digests[A.digest[r]]) add("digest", facts.digests[A.digest[r]].slice(0, 12));
  add("completion", `${facts.labels[A.group[r]]} / ${A.index[r]}`);
  box.replaceChildren(head, list);
  box.classList.toggle("pinned", pinned === element);
  box.hidden = false;
  element.setAttribute("aria-describedby", "inspector");
  place();
}

function place() {
  const box = $("inspector"), at = shown.getBoundingClientRect(), size = box.getBoundingClientRect();
  box.style.left = Math.max(8, Math.min(at.left, innerWidth - size.width - 8)) + "px";
  const below = at.bottom + 8;
  box.style.top = (below + size.height < innerHeight ? below : Math.max(8, at.top - size.height - 8)) + "px";
}

function close() {
  pinned = null;
  shown?.removeAttribute("aria-describedby");
  shown = null;
  $("inspector").hidden = true;
}

const tokenAt = event => event.target.closest?.("button.t");
const groups = $("groups");
groups.addEventListener("pointerover", event => { const at = tokenAt(event); if (at && !pinned) open(at); });
groups.addEventListener("pointerleave", () => { if (!pinned && document.activeElement !== shown) close(); });
groups.addEventListener("focusin", event => { const at = tokenAt(event); if (at && !pinned) open(at); else if (!at && !pinned) close(); });
groups.addEventListener("focusout", event => { if (!pinned && !event.relatedTarget?.closest?.("button.t")) close(); });
groups.addEventListener("click", event => {
  const at = tokenAt(event);
  if (!at) return;
  if (pinned === at) return close();
  pinned = at;
  open(at);
});
addEventListener("scroll", () => {
  if (!shown) return;
  const at = shown.getBoundingClientRect();
  if (at.bottom < 0 || at.top > innerHeight) close(); else place();
}, { passive: true });
addEventListener("keydown", event => { if (event.key === "Escape") close(); });
groups.addEventListener("keydown", event => {
  const at = tokenAt(event);
  if (!at) return;
  const all = [...at.closest(".tokens").querySelectorAll("button.t")], place = all.indexOf(at);
  const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: all.length - 1 }[event.key];
  const sides = [...groups.querySelectorAll(".tokens")], side = sides.indexOf(at.closest(".tokens"));
  const other = { ArrowDown: sides[side + 1], ArrowUp: sides[side - 1] }[event.key];
  const target = to !== undefined ? all[to] : other && [...other.querySelectorAll("button.t")].at(0);
  if (to === undefined && !other) return;
  event.preventDefault();
  if (!target) return;
  at.tabIndex = to === undefined ? at.tabIndex : -1;
  target.tabIndex = 0;
  pinned = null;
  target.focus();
});

// ---- theme and curves ----

const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const plots = [];

function dress() {
  $("theme").setAttribute("aria-pressed", isDark());
  const probe = make("span");
  document.body.append(probe);
  const resolved = name => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  for (const plot of plots) {
    for (const axis of [...plot.below, ...plot.left]) axis.major_label_text_color = resolved("--muted");
    for (const axis of plot.below) axis.axis_line_color = resolved("--line");
    for (const part of plot.center) part.grid_line_color = resolved("--line");
    for (const { glyph, name } of plot.renderers) {
      glyph.line_color = resolved(`--c${+name + 1}`);
      if ("fill_color" in glyph) glyph.fill_color = resolved(`--c${+name + 1}`);
    }
  }
  probe.remove();
}

$("theme").onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("accredit-theme", document.documentElement.dataset.theme); } catch { /* storage is off */ }
  dress();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);

async function drawCurves() {
  const items = JSON.parse($("items").textContent);
  if (!items.length) return;
  const script = make("script");
  script.textContent = new TextDecoder().decode(await unpacked("plotting"));
  document.head.append(script);
  Bokeh.set_log_level("error");
  for (const [place, item] of items.entries()) {
    await Bokeh.embed.embed_item(item, `plot-${place}`);
    plots.push(...Bokeh.documents.at(-1).roots());
  }
  dress();
}

form.addEventListener("input", event => { if (["method", "permuted"].includes(event.target.name)) assign(); refresh(); });
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("reset", () => setTimeout(() => { assign(); refresh(); }));

addEventListener("DOMContentLoaded", () => requestAnimationFrame(() => setTimeout(async () => {
  dress();
  await readArrays();
  assign();
  refresh();
  await drawCurves();
  document.documentElement.dataset.ready = "true";
})));
