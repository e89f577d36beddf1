// The live page. Two sources: /live/map once for each start of the server, /live/stats each second while the page is
// seen. Counters are turned into rates here, between two snapshots, so any number of pages may look at once.

const POLL_MS = 1000;
const PATIENCE_MS = 5000;
const RATE_SPAN_S = 3;
const LINE_SPAN_S = 120;
const UNITS = { TiB: 2 ** 40, GiB: 2 ** 30, MiB: 2 ** 20, KiB: 2 ** 10 };

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function tell(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

// -- words and numbers ------------------------------------------------------------------------------------------------

function size(bytes) {
  for (const [unit, factor] of Object.entries(UNITS)) {
    if (bytes >= factor) return `${(bytes / factor).toFixed(2)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function bandwidth(bytesPerSecond) {
  for (const [unit, factor] of [["GB/s", 1e9], ["MB/s", 1e6], ["KB/s", 1e3]]) {
    if (bytesPerSecond >= factor) return `${(bytesPerSecond / factor).toFixed(2)} ${unit}`;
  }
  return `${Math.round(bytesPerSecond)} B/s`;
}

function duration(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

const count = (number) => Math.round(number).toLocaleString("en");
const some = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const perSecond = (rate) => (rate >= 100 ? count(rate) : rate.toFixed(1));
const words = (name) => name.replaceAll("_", " ");
const hyphened = (access) => access.replaceAll("_", "-");

function percent(share) {
  const value = 100 * share;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

// -- the server -------------------------------------------------------------------------------------------------------

class ServerError extends Error {}

async function getJson(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) throw new ServerError(await refusal(response));
  return response.json();
}

/** What a response that is no success says, in words. */
async function refusal(response) {
  const body = await response.json().catch(() => null);
  if (response.status === 401) return "The server asks for its key. Reload the page to give it.";
  return body?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
}

// -- rates ------------------------------------------------------------------------------------------------------------

/** Snapshots of the last two minutes, and rates between them. */
class History {
  snapshots = [];
  points = [];

  add(stats) {
    if (this.snapshots.length && stats.started_at !== this.snapshots[0].started_at) this.snapshots = this.points = [];
    this.snapshots = [...this.snapshots.filter((s) => s.clock_s > stats.clock_s - LINE_SPAN_S), stats];
    const rates = this.rates(stats);
    this.points = this.points.filter((p) => p.at > stats.clock_s - LINE_SPAN_S);
    if (rates) this.points.push({ at: stats.clock_s, value: rates.link });
    return rates;
  }

  /** Per second over the last seconds, and over two steps at least where steps are long; null for a first snapshot. */
  rates(stats) {
    const since = stats.clock_s - Math.max(RATE_SPAN_S, 2 * stats.step_s);
    const from = this.snapshots.findLast((s) => s.clock_s <= since) ?? this.snapshots[0];
    const seconds = stats.clock_s - from.clock_s;
    if (seconds <= 0) return null;
    const rate = (read) => Math.max(0, read(stats) - read(from)) / seconds;
    return {
      generated: rate((s) => s.generation_tokens),
      prompt: rate((s) => s.prompt_tokens),
      link: rate((s) => s.link?.bytes ?? 0),
      stall: Math.min(1, rate((s) => s.link?.stall_s ?? 0)),
      expertHits: rate((s) => s.experts?.stream?.hits ?? 0),
      expertLookups: rate((s) => s.experts?.stream?.lookups ?? 0),
      expertBytes: rate((s) => s.experts?.stream?.bytes ?? 0),
    };
  }
}

// -- the figures ------------------------------------------------------------------------------------------------------

function showNow(stats, rates) {
  const link = stats.link;
  tell("tokens", rates ? `${perSecond(rates.generated)} tokens/s` : "–");
  tell("prompt-tokens", rates ? `and ${perSecond(rates.prompt)} prompt tokens/s read` : " ");
  tell("requests", `${count(stats.running)} running`);
  const { stop = 0, length = 0, abort = 0, error = 0 } = stats.finished;
  tell("finished", [
    `${count(stats.waiting)} waiting`,
    `${count(stop + length)} done`,
    ...(abort ? [`${count(abort)} gone`] : []),
    ...(error ? [`${count(error)} failed`] : []),
  ].join(", "));
  tell("step", stats.steps ? duration(stats.step_s) : "–");
  const floor = stats.step_link_floor_s;
  tell("floor", [
    ...(stats.steps ? [some(stats.step_tokens, "token")] : []),
    ...(floor === null ? [] : [`link floor ${duration(floor)}`]),
  ].join(", "));
  tell("stall", link?.stall_s === null ? "not known" : link && rates ? percent(rates.stall) : "–");
  tell("stall-note", !link ? "no link" : link.stall_s === null ? "a GPU does not tell" : "of the time");
  tell("kv", percent(stats.kv_usage));
  const cache = stats.memory.flatMap((m) => m.purposes).find((p) => p.purpose === "kv_cache");
  tell("context", cache?.planned_bytes ? `of ${size(cache.planned_bytes)}` : " ");
  $("requests").title = stats.batching;
}

function showLink(link, rates, points, clock) {
  tell("link-span", link ? "last two minutes" : "");
  $("line").toggleAttribute("hidden", !link);
  if (!link) {
    tell("link-now", "none");
    tell("link-limit", "");
    tell("link-note", "Every weight is in the memory that this device computes in.");
    return;
  }
  tell("link-now", rates ? bandwidth(rates.link) : "–");
  const share = rates ? ` (${percent(rates.link / link.bytes_per_s)})` : "";
  tell("link-limit", `of ${bandwidth(link.bytes_per_s)} ${link.measured ? "measured" : "stated"}${share}`);
  tell("link-note", `${size(link.bytes)} in ${some(link.transfers, "transfer")} since the start` +
    (link.zero_copy_counted ? "" : "; what the GPU reads in place is not counted"));
  drawLine(points, link.bytes_per_s, clock);
}

function drawLine(points, limit, clock) {
  const top = 1.15 * Math.max(limit, ...points.map((p) => p.value));
  const x = (at) => (LINE_SPAN_S - (clock - at)).toFixed(2);
  const y = (value) => (100 - (100 * value) / top).toFixed(2);
  const path = points.map((p, i) => `${i ? "L" : "M"}${x(p.at)} ${y(p.value)}`).join("");
  const svg = $("line");
  svg.querySelector(".stroke").setAttribute("d", path);
  svg.querySelector(".area").setAttribute(
    "d", points.length ? `${path}L${x(points.at(-1).at)} 100L${x(points[0].at)} 100Z` : "");
  for (const end of ["y1", "y2"]) svg.querySelector(".limit").setAttribute(end, y(limit));
}

function showMemory(tiers) {
  const total = (purposes, field) => purposes.reduce((sum, p) => sum + (p[field] ?? 0), 0);
  $("memory").replaceChildren(...tiers.flatMap(({ tier, limit_bytes, peak_bytes, purposes }) => {
    const told = purposes.filter((p) => p.held_bytes || p.planned_bytes);
    const [now, plan] = [total(told, "held_bytes"), total(told, "planned_bytes")];
    if (limit_bytes === null) return [row("tier", [tier, size(now), size(plan), "no limit"])];
    const fill = make("div", { class: "fill" }, ...told.map((p) => make("i", { title: words(p.purpose) })));
    told.forEach((p, i) => (fill.children[i].style.width = `${(100 * p.held_bytes) / Math.max(plan, now, 1)}%`));
    return [
      row("tier", [tier, size(now), size(plan), size(limit_bytes)]),
      make("tr", {}, make("td", { colspan: 4 }, fill)),
      ...told.map((p) => row("", [
        p.purpose === "kv_cache" ? "KV cache" : words(p.purpose),
        size(p.held_bytes),
        p.planned_bytes === null ? "not known" : size(p.planned_bytes),
        "",
      ])),
      ...(peak_bytes > now ? [row("", ["most at once", size(peak_bytes), "", ""])] : []),
    ];
  }));

  function row(name, cells) {
    return make("tr", { class: name }, ...cells.map((cell) => make("td", {}, cell)));
  }
}

/** What became of routed experts that are streamed or placed; nothing where there are none. */
function showExperts(experts, rates) {
  $("experts").hidden = !experts;
  if (!experts) return;
  const { stream, placed } = experts;
  const missed = stream && {
    fetch: `fetched from ${stream.tier}`,
    cpu: "computed on the CPU",
    auto: `fetched from ${stream.tier} or computed`,
  }[stream.policy];
  tell("experts-about", stream ? `misses are ${missed}; a slot has ${size(stream.slot_bytes)}` : "");
  const figures = [...(stream ? streamFigures(stream, rates) : []), ...(placed ? [placedFigure(placed)] : [])];
  const list = $("experts-figures");
  if (list.children.length !== figures.length) {
    list.replaceChildren(...figures.map(([name]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, make("b"), make("small")))));
  }
  figures.forEach(([, figure, note], i) => {
    list.children[i].querySelector("b").textContent = figure;
    list.children[i].querySelector("small").textContent = note;
  });
}

function streamFigures(s, rates) {
  const lately = rates?.expertLookups ? percent(rates.expertHits / rates.expertLookups) : "–";
  const ever = s.lookups ? percent(s.hits / s.lookups) : "–";
  const ahead = s.prefetch_used + s.prefetch_wasted;
  return [
    ["found in a slot, last seconds", lately, `${ever} of ${count(s.lookups)} since the start`],
    ["missed", count(s.lookups - s.hits), [
      ...(s.fetched ? [`${count(s.fetched)} fetched`] : []),
      ...(s.streamed ? [`${count(s.streamed)} passed through`] : []),
      ...(s.computed ? [`${count(s.computed)} computed`] : []),
    ].join(", ")],
    ["fetched ahead and used", ahead ? percent(s.prefetch_used / ahead) : "–", [
      `${count(s.prefetch_used)} used`, `${count(s.prefetch_wasted)} wasted`, `${count(s.prefetched - ahead)} waiting`,
    ].join(", ")],
    ["slots in use", `${count(s.slots_held)} of ${count(s.slots)}`, [
      `${count(s.evictions)} evicted`, ...(s.promoted ? [`${count(s.promoted)} promoted`] : []),
    ].join(", ")],
    ["brought", rates ? bandwidth(rates.expertBytes) : "–",
      `${size(s.bytes)}, waited ${duration(s.stall_s)} since the start`],
  ];
}

function placedFigure(placed) {
  const layers = placed.layers.map(({ layer }) => layer);
  return ["computed on the CPU", `${layers.length === 1 ? "layer" : "layers"} ${ranges(layers)}`,
    `${some(placed.calls, "call")} over ${some(placed.tokens, "token")}, ${size(placed.bytes)} read`];
}

/** Numbers in ascending order as ranges: "0–3, 7". */
function ranges(numbers) {
  const runs = [];
  for (const n of numbers) {
    if (runs.length && n === runs.at(-1)[1] + 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

// -- the map ----------------------------------------------------------------------------------------------------------

const SHADES = [
  [["attention"], "attention"],
  [["dense_mlp", "embedding", "head", "tower"], "dense"],
  [["shared_expert"], "shared expert"],
  [["routed_expert"], "routed experts"],
  [["norm", "router", "buffer", "other"], "norms and small"],
];

/** The model as a grid of weights, a row for each layer. Tabbing comes to one weight, arrows go to the others. */
class WeightMap {
  constructor(rows, detail) {
    this.rows = rows;
    this.detail = detail;
    this.blocks = new Map();
    this.lines = [];
    rows.addEventListener("keydown", (event) => this.#key(event));
    rows.addEventListener("focusin", (event) => this.#choose(event.target));
    rows.addEventListener("pointerover", (event) => this.#show(event.target));
    rows.addEventListener("pointerleave", () => this.#show(this.chosen));
    rows.addEventListener("click", (event) => event.target.closest(".block")?.focus());
    new ResizeObserver(() => this.#label()).observe(rows);
  }

  draw(map) {
    const sizes = (rows) => rows.map((row) => row.bytes);
    const layers = map.rows.filter((row) => row.layer !== null);
    const longest = Math.max(...sizes(layers.length ? layers : map.rows), 1);
    this.blocks.clear();
    this.lines = map.rows.map((row) => this.#line(row, longest));
    this.rows.replaceChildren(...this.lines.map((line) => line.element));
    this.chosen = this.lines[0]?.cells[0];
    if (this.chosen) this.chosen.tabIndex = 0;
    this.#show(null);
    this.#label();
  }

  #line(row, longest) {
    const cells = row.blocks.map((block) => this.#cell(block, row));
    const bar = make("div", { class: "bar", role: "none" }, ...cells);
    bar.style.setProperty("--share", Math.min(1, row.bytes / longest));
    const element = make(
      "div", { class: row.bytes > longest ? "row cut" : "row", role: "row" },
      make("span", { class: "name", role: "rowheader", title: row.label }, make("span", {}, row.label)),
      bar,
      make("span", { class: "size", "aria-hidden": "true" }, make("span", {}, size(row.bytes))));
    return { element, cells, layer: row.layer, bytes: row.bytes };
  }

  #cell(block, row) {
    const cell = make("span", {
      class: "block tone", role: "gridcell", tabindex: "-1",
      "data-tier": block.tier, "data-access": block.access, "data-role": block.role,
      "aria-label": `${block.name}, ${facts(block)}; ${place(block)}: ${block.reason}`,
    });
    cell.style.flexGrow = block.bytes;
    if (block.experts) cell.style.setProperty("--cuts", cuts(block.experts));
    this.blocks.set(cell, { block, label: row.label });
    return cell;
  }

  /** As many rows are labelled as there is room for: the largest outside the layers first, then round numbers. */
  #label() {
    if (!this.lines.length) return;
    const height = this.lines[0].element.getBoundingClientRect().height;
    const apart = Math.ceil(12 / Math.max(height, 1));
    const step = [1, 2, 4, 5, 8, 10, 16, 20, 32].find((n) => n >= apart) ?? apart;
    const told = new Set();
    const tellIfFree = (i) => {
      for (let near = i - apart + 1; near < i + apart; near++) if (told.has(near)) return;
      told.add(i);
    };
    const order = this.lines.map((line, i) => [line, i]);
    const outside = order.filter(([line]) => line.layer === null).sort(([a], [b]) => b.bytes - a.bytes);
    const round = order.filter(([line]) => line.layer !== null && line.layer % step === 0);
    for (const [, i] of [...outside, ...round]) tellIfFree(i);
    this.lines.forEach((line, i) => line.element.classList.toggle("told", told.has(i)));
  }

  #choose(cell) {
    if (!this.blocks.has(cell)) return;
    if (this.chosen) this.chosen.tabIndex = -1;
    this.chosen = cell;
    cell.tabIndex = 0;
    this.#show(cell);
  }

  #show(cell) {
    const found = this.blocks.get(cell);
    if (!found && cell !== null) return;
    this.shown?.classList.remove("shown");
    this.shown = cell;
    if (!found) {
      const hint = "Point at a weight or tap it; with the keyboard, tab to the map and use the arrows.";
      this.detail.replaceChildren(make("p", { class: "soft" }, hint));
      return;
    }
    cell.classList.add("shown");
    const { block, label } = found;
    const reason = [block.reason, ...block.tied.map((name) => `tied to ${name}`)].join("; ");
    this.detail.replaceChildren(
      make("p", { class: "title" }, make("b", {}, block.name), make("span", {}, key(block), place(block))),
      make("p", {}, `${label}: ${facts(block)}`),
      make("p", { class: "soft" }, reason));
  }

  #key(event) {
    const y = this.lines.findIndex((line) => line.cells.includes(event.target));
    if (y < 0 || event.altKey || event.metaKey) return;
    const cells = this.lines[y].cells;
    const x = cells.indexOf(event.target);
    const last = this.lines.length - 1;
    const whole = event.ctrlKey;
    const target = {
      ArrowLeft: () => cells[Math.max(0, x - 1)],
      ArrowRight: () => cells[Math.min(cells.length - 1, x + 1)],
      ArrowUp: () => this.#below(event.target, Math.max(0, y - 1)),
      ArrowDown: () => this.#below(event.target, Math.min(last, y + 1)),
      PageUp: () => this.#below(event.target, Math.max(0, y - 10)),
      PageDown: () => this.#below(event.target, Math.min(last, y + 10)),
      Home: () => (whole ? this.lines[0].cells[0] : cells[0]),
      End: () => (whole ? this.lines[last].cells : cells).at(-1),
    }[event.key]?.();
    if (!target) return;
    event.preventDefault();
    target.focus();
  }

  /** The cell of row `y` that is nearest to straight above or below `cell`. */
  #below(cell, y) {
    const middle = (of) => of.getBoundingClientRect().left + of.getBoundingClientRect().width / 2;
    const from = middle(cell);
    const distance = (of) => Math.abs(middle(of) - from);
    return this.lines[y].cells.reduce((best, of) => (distance(of) < distance(best) ? of : best));
  }
}

function facts(block) {
  const shape = block.shape.length ? block.shape.join(" × ") : "scalar";
  return [
    words(block.role),
    block.experts && block.count === 1 ? `${block.experts} experts stacked` : null,
    block.count > 1 ? `${block.count} experts of ${shape} ${block.dtype} each` : `${shape} ${block.dtype}`,
    size(block.bytes),
  ].filter(Boolean).join(", ");
}

const place = ({ tier, access }) => `${tier}, ${hyphened(access)}`;
const key = ({ tier, access }) => make("i", { class: "key tone", "data-tier": tier, "data-access": access });

/** Into how many parts a stack of experts is drawn: a fraction of them where all would be too fine to see. */
function cuts(experts) {
  while (experts > 32) experts = Math.ceil(experts / 2);
  return experts;
}

function showLegend(map) {
  $("whole").replaceChildren(...map.accesses.map((held) => {
    const part = make("i", { class: "tone", "data-tier": held.tier, "data-access": held.access });
    part.style.flex = `${held.bytes} 1 0`;
    return part;
  }));
  $("legend").replaceChildren(...map.accesses.map((held) => {
    const share = percent(held.bytes / Math.max(map.bytes, 1));
    const figure = make("b", { title: `${held.bytes.toLocaleString("en")} bytes` }, size(held.bytes));
    const item = make("li", {}, key(held), `${place(held)} `, figure, `, ${share}`,
      make("span", { class: "wide" }, `, ${some(held.weights, "weight")}`));
    Object.assign(item.dataset, { tier: held.tier, kind: held.access, bytes: held.bytes });
    return item;
  }));
  const roles = new Set(map.rows.flatMap((row) => row.blocks.map((block) => block.role)));
  $("shades").replaceChildren(...SHADES.filter(([of]) => of.some((role) => roles.has(role))).map(([[role], text]) =>
    make("li", {}, make("i", { class: "key tone", "data-role": role }), text)));
}

// -- the chat ---------------------------------------------------------------------------------------------------------

/** A conversation with the model; without a chat template, a text that the model continues. */
class Chat {
  messages = [];
  running = null;

  constructor() {
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.#ask($("prompt").value.trim());
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) $("form").requestSubmit();
    });
    $("clear").addEventListener("click", () => this.clear());
  }

  open(map, model) {
    this.kind = map.chat;
    this.model = model;
    this.context = map.max_request_tokens;
    $("send").disabled = this.kind === "none" || !model;
    $("prompt").disabled = this.kind === "none";
    tell("chat-state", {
      template: "",
      text: "This model has no chat template: it continues your text as it stands.",
      none: "This model came without a tokenizer, so it cannot be given text here.",
    }[this.kind]);
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    $("log").replaceChildren();
    $("clear").hidden = true;
    $("prompt").focus();
  }

  async #ask(text) {
    if (!text || $("send").disabled) return;
    $("prompt").value = "";
    $("clear").hidden = false;
    if (this.kind !== "template") this.messages = [];
    this.messages.push({ role: "user", content: text });
    this.#say("you", text);
    const messages = this.messages;
    const running = (this.running = new AbortController());
    $("send").textContent = "Stop";
    tell("chat-state", "Waiting for the first token…");
    const answer = this.#say("answer", "");
    const begun = performance.now();
    let whole = "";
    let end = {};
    try {
      for await (const event of this.#stream(text, running.signal)) {
        const choice = event.choices?.[0];
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        if (piece && !whole) tell("chat-state", "Answering…");
        whole += piece;
        answer.append(piece);
        this.#follow();
        end = { reason: choice?.finish_reason ?? end.reason, usage: event.usage ?? end.usage };
      }
      const tokens = end.usage?.completion_tokens;
      const seconds = (performance.now() - begun) / 1000;
      tell("chat-state", [
        end.reason === "length" ? "Cut at the limit of tokens" : "Done",
        ...(tokens ? [`${some(tokens, "token")} in ${duration(seconds)}`] : []),
      ].join(": "));
    } catch (error) {
      const stopped = running.signal.aborted;
      if (!stopped) this.#say("wrong", error instanceof ServerError ? error.message : "The server does not answer.");
      tell("chat-state", stopped ? "Stopped." : "");
    }
    if (whole) messages.push({ role: "assistant", content: whole });
    else {
      messages.pop();
      answer.remove();
    }
    if (this.running === running) this.running = null;
    if (!this.running) $("send").textContent = "Send";
  }

  /** The events of an answer, as OpenAI streams them. */
  async *#stream(text, signal) {
    const chat = this.kind === "template";
    const limit = $("max-tokens").valueAsNumber;
    const body = {
      model: this.model,
      temperature: $("temperature").valueAsNumber || 0,
      stream: true,
      stream_options: { include_usage: true },
      ...(chat ? { messages: this.messages } : { prompt: text }),
      ...(limit >= 1 ? { max_tokens: limit } : chat ? {} : { max_tokens: Math.min(128, Math.ceil(this.context / 2)) }),
    };
    const response = await fetch(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
    if (!response.ok) throw new ServerError(await refusal(response));
    let rest = "";
    const decoder = new TextDecoder();
    const reader = response.body.getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + decoder.decode(part.value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice("data:".length).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message);
        yield event;
      }
    }
    throw new ServerError("The answer broke off.");
  }

  #say(who, text) {
    const line = make("p", { class: who }, text);
    $("log").append(line);
    $("log").scrollTop = $("log").scrollHeight;
    return line;
  }

  /** Keep the end in view, unless the reader has scrolled up. */
  #follow() {
    const log = $("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 60) log.scrollTop = log.scrollHeight;
  }
}

// -- the page ---------------------------------------------------------------------------------------------------------

const weightMap = new WeightMap($("rows"), $("detail"));
const chat = new Chat();
const history = new History();
let shownStart = null;
let lastHeard = null;
let timer = 0;
let turns = 0;

for (const choice of document.getElementsByName("scale")) {
  choice.addEventListener("change", () => $("rows").classList.toggle("equal", choice.value === "equal"));
}
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) look();
});

async function look() {
  clearTimeout(timer);
  const turn = ++turns; // an answer that comes after a later look is not shown
  try {
    const stats = await getJson("/live/stats");
    if (stats.started_at !== shownStart) await open();
    if (turn === turns) show(stats);
  } catch (error) {
    if (turn === turns) lose(error);
  }
  if (turn === turns && !document.hidden) timer = setTimeout(look, POLL_MS);
}

async function open() {
  const [map, models] = await Promise.all([getJson("/live/map"), getJson("/v1/models")]);
  const model = models.data[0]?.id;
  showLegend(map);
  weightMap.draw(map);
  chat.open(map, model);
  tell("model", model ?? map.architecture);
  document.title = `${model ?? map.architecture} · overspill`;
  tell("about", `${map.architecture}, ${size(map.bytes)}, ${count(map.context_tokens)} tokens of context`);
  shownStart = map.started_at;
}

function show(stats) {
  const rates = history.add(stats);
  showNow(stats, rates);
  showLink(stats.link, rates, history.points, stats.clock_s);
  showExperts(stats.experts, rates);
  showMemory(stats.memory);
  showState(stats.failure ? "lost" : "live", stats.failure ? "failed" : stats.device.name);
  raise(stats.failure ? `The engine cannot go on: ${stats.failure}` : "");
  $("emulated").hidden = !stats.device.emulated;
  $("main").classList.remove("stale");
  lastHeard = new Date();
}

function lose(error) {
  showState("lost", "no answer");
  $("main").classList.add("stale");
  const heard = lastHeard ? ` These figures are of ${lastHeard.toLocaleTimeString("en-GB")}.` : "";
  const what = error instanceof ServerError ? error.message : "The server does not answer; trying again each second.";
  raise(what + heard);
}

function showState(name, text) {
  $("state").className = `state ${name}`;
  tell("state", text);
}

function raise(alarm) {
  tell("alarm", alarm);
  $("alarm").hidden = !alarm;
}

look();
