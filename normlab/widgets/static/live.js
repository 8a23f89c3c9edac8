/* The page that runs models: controls, charts and the tour.

   live(root, data, host)
     data   { models: [{ name, title, label, colors, depth, traits, spec, rate, held_out }], pairs: [{ label, model, against }],
              passages: [{ tokens, name }], tokenizer or vocabulary, kernel, tour }
     host   { read() -> state, write(state), weights(name) -> bytes, engine?(model) }: a page's address, or a widget's traits
   A state is { model, against, text, at, change, step, field }; what it leaves out has its default. */
const FIELDS = {
  block: { label: "block", about: "how much of what the block adds is kept: 1 all of it, 0 none" },
  attention: { label: "attention", about: "how much of what attention adds is kept" },
  mlp: { label: "MLP", about: "how much of what the MLP adds is kept" },
  gain: { label: "γ", about: "factor on the gain of the block's norms; norms of queries and keys stay as they are", factor: true },
  lam: { label: "λ", about: "factor on λ, which multiplies a tanh's input", factor: true, needs: "slope" },
  kappa: { label: "κ", about: "factor on κ, which divides a tanh's input", factor: true, needs: "kappa" },
  exact: { label: "statistic", about: "the MLP's norm measures the stream again, in place of the carried statistic", flag: true, needs: "carried" },
};
const OCTAVES = 4; // a factor's slider goes from 1/16 to 16
const COSTS_AFTER_MS = 150; // after a move, before the blocks' costs are measured: the next move then finds the model free

/* Each step: a finding, the model that shows it, and a change that tries it. tests/widgets/test_widgets_live.py checks them. */
const TOUR = [
  { title: "One block carries most of it", change: { layers: { 1: { block: 0 } } },
    say: "Every block adds to a running sum, the residual stream. The bars show how much the loss rises without each block. Skip block 1: without it Pre-LN does no better than a guess. Skip another with its slider, or choose another model: which block matters depends on how it was trained.",
    act: "Skip block 1" },
  { title: "Half of every block is almost enough", change: { block: 0.5 },
    say: "Let every block add half of what it learned to add. The stream shrinks to half, but the loss of Pre-LN and LNS moves by little: each block begins with a norm, which divides by the stream's size, so only proportions count.",
    act: "Halve every block" },
  { title: "A gain is not divided away", change: { gain: 0.5 },
    say: "After it has divided by the stream's size, a norm multiplies by its gain γ. Halve every γ: nothing makes up for it, and the loss rises several times as much as when every block was halved.",
    act: "Halve every gain" },
  { title: "A carried statistic is good enough", needs: "carried", change: { exact: true },
    say: "A norm divides by the root of the stream's mean square. BHyT computes that once a block, before attention, and its MLP's norm makes do with the same number. Let the MLP's norm compute its own: layers hardly move and the loss rises by little, although the model never trained that way.",
    act: "Make it exact" },
  { title: "κ is a bound and a gain", needs: "kappa", change: { kappa: 0.25 },
    say: "BHyT's norm is a tanh of λ/κ times the stream divided by its size. A large κ keeps the tanh's input below λ: as trained, no input goes beyond it. With a quarter of κ the input is four times as large, and the stream grows. Now some inputs go beyond λ, in attention never more than a share of 1/κ², the dotted bound.",
    act: "Quarter κ" },
];

/* A model in a worker, or in the page where it may not start one: methods of LiveModel as promises. */
function engineOf(spec, weights, kernel) {
  const constants = `const AS_IS = ${JSON.stringify(AS_IS)}, MATRICES = ${JSON.stringify(MATRICES)};`;
  const source = [constants, changeAt, padded, readSafetensors, erf, plainMatmul, LiveModel, serveModel, "serveModel(self);"].join("\n");
  const waiting = new Map();
  let worker = null;
  const settle = ({ data: { id, answer, error } }) => {
    const { resolve, reject } = waiting.get(id);
    waiting.delete(id);
    error ? reject(new Error(error)) : resolve(answer);
  };
  try {
    worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    worker.onmessage = settle;
  } catch {
    const scope = { postMessage: data => settle({ data }) };
    serveModel(scope);
    worker = { postMessage: data => setTimeout(scope.onmessage, 0, { data }) };
  }
  let count = 0;
  const call = method => (...values) => new Promise((resolve, reject) => {
    waiting.set(++count, { resolve, reject });
    worker.postMessage({ id: count, method, values });
  });
  const loaded = call("load")(spec, weights, new Uint8Array(kernel));
  return { loaded, ask: call("ask"), without: call("without"), close: () => worker.terminate?.() };
}

const element = (tag, options = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
};
/* Put others in the place of an element's children; the focus stays on the button of the same name, or on the first. */
function replaceButtons(parent, ...children) {
  const focused = parent.getRootNode().activeElement, inside = parent.contains(focused);
  parent.replaceChildren(...children);
  const buttons = [...parent.querySelectorAll("button:enabled")];
  if (inside) (buttons.find(button => button.textContent === focused.textContent) ?? buttons[0])?.focus();
}
/* Where a position is in a text: a negative one counts from the end, none is the last token's, one beyond the text the nearest. */
const placeIn = ({ length }, at) => Math.max(0, Math.min(at < 0 ? length + at : at ?? length - 1, length - 1));
/* How a token's loss looks: its colour in percent, whether it is underlined, and in words. A loss that is not finite is the worst. */
const MOST_NATS = 8; // at which a token has the strongest colour
function lossLook(nats, old, changes) {
  const isBroken = !Number.isFinite(nats), said = value => (Number.isFinite(value) ? value.toFixed(2) : "not finite");
  return {
    heat: Math.round(62 * (isBroken ? 1 : Math.min(nats / MOST_NATS, 1))), worse: isBroken || nats - old >= 1,
    title: `${isBroken ? "loss not finite" : `${said(nats)} nats`}${changes ? `, as trained ${said(old)}` : ""}`,
  };
}
/* The tokens that two sets of chances make likeliest, at most eight; of a broken model's, which are not finite, the other's count. */
function likeliest(now, old) {
  const most = token => [now[token], old[token]].reduce((a, b) => (b > a || !Number.isFinite(a) ? b : a));
  return now.map((_, token) => token).filter(token => most(token) > 0.004).sort((a, b) => most(b) - most(a)).slice(0, 8);
}
const differs = change => JSON.stringify(change) !== "{}";

/* Drop what changes nothing, so that equal changes are written alike. */
function tidy({ layers = {}, ...all }) {
  const kept = (own, base) => Object.fromEntries(Object.entries(own).filter(([name, value]) => value !== base[name]));
  const every = kept(all, AS_IS), base = { ...AS_IS, ...every };
  const rest = Object.entries(layers).map(([layer, own]) => [layer, kept(own, base)]).filter(([, own]) => differs(own));
  return { ...every, ...(rest.length ? { layers: Object.fromEntries(rest) } : {}) };
}

/* One model's answers: its loss, charts, text and next tokens. Grey boxes stand for them until it has answered. */
class Panel {
  constructor(model, data, choose) {
    Object.assign(this, { model, data, choose, before: null, now: null, trained: null, costs: null, known: false });
    const part = (name, tag = "div") => (this[name] = element(tag, { className: name }));
    this.root = element("section", { className: "panel loading", ariaLabel: model.title }, part("head"),
      element("div", { className: "charts" }, part("profile"), part("cost"), element("div", {}, element("h3", { textContent: "next token" }),
        element("p", { className: "unit", textContent: "probability; grey: as trained" }), part("next")), part("share")),
      element("div", {}, element("h3", { textContent: "loss by token" }),
        element("p", { className: "unit", textContent: "stronger colour: more nats; underlined: at least 1 more than as trained, or not finite. Choose a token to see what follows." }), part("text")));
    this.share.hidden = !model.traits.includes("slope");
    const facts = [model.rate != null && `learning rate ${model.rate}`, model.held_out != null && `held-out loss ${model.held_out.toFixed(3)}`].filter(Boolean);
    this.head.append(element("h2", { textContent: model.title }), ...(facts.length ? [element("p", { className: "facts", textContent: facts.join(" · ") })] : []),
      part("loss", "p"));
    this.loss.textContent = "loading…";
  }

  async begin(host) {
    this.engine = host.engine?.(this.model) ?? engineOf(this.model.spec, await host.weights(this.model.name), this.data.kernel);
    await this.engine.loaded;
  }

  async ask(change, at) {
    this.asked = JSON.stringify(change);
    const answer = await this.engine.ask(this.tokens, change, at), number = value => value ?? NaN; // JSON has no NaN
    return Array.isArray(answer.losses) ? { ...answer, loss: number(answer.loss), losses: answer.losses.map(number), logits: answer.logits.map(number) } : answer;
  }

  async read(at) {
    this.before = { ...(await this.ask({}, at)), at };
    this.known = false; // the costs shown are of another text
  }

  async answer(change, at) {
    if (!this.before) await this.read(at);
    if (this.before.at !== at) this.before = { ...this.before, logits: (await this.ask({}, at)).logits, at };
    const start = performance.now();
    this.now = await this.ask(change, at);
    this.took = performance.now() - start;
    this.stale = !this.known || differs(change); // until they are measured again
    if (!differs(change)) this.costs = null;
  }

  /* What each block's removal adds to the loss, as trained and under the change: one block a call, until something else is asked. */
  async measure(change, stopped) {
    const added = async (under, { loss, at }) => {
      if (this.asked !== JSON.stringify(under)) await this.ask(under, at);
      const costs = [];
      while (costs.length < this.model.depth && !stopped()) costs.push((await this.engine.without(costs.length + 1) ?? NaN) - loss);
      return stopped() ? null : costs;
    };
    if (!this.known) this.trained = await added({}, this.before) ?? this.trained;
    this.known ||= !stopped();
    if (differs(change) && !stopped()) this.costs = await added(change, { ...this.now, at: this.before.at }) ?? this.costs;
    this.stale = stopped();
  }

  /* Another text: shown at once, whatever the model is still to say of it. */
  write(tokens, at) {
    if (String(this.tokens) === String(tokens)) return this.mark(at);
    [this.tokens, this.before, this.now, this.costs] = [tokens, null, null, null];
    const word = token => this.data.words?.decode(token) ?? `#${token} `;
    this.text.replaceChildren(...tokens.map((token, place) => element("span", {
      textContent: word(token).replaceAll("\n", "⏎\n"), onclick: () => this.choose(place),
    })));
    this.text.tabIndex = 0;
    this.text.setAttribute("aria-label", "the text; arrow keys choose a token");
    this.mark(at);
  }

  /* Show which token was chosen. */
  mark(at) {
    [...this.text.children].forEach((word, place) => word.classList.toggle("chosen", place === at));
    this.text.onkeydown = ({ key }) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
      if (step) this.choose(Math.max(0, Math.min(at + step, this.tokens.length - 1)));
    };
  }

  get color() {
    return `var(--model, ${this.model.colors.light})`;
  }

  /* What the charts show, by name. */
  charts(changes) {
    const { before, now, color, costs, trained } = this;
    const was = values => (changes ? [{ name: "as trained", values, color: "var(--soft)", dash: "5 4" }] : []);
    const layers = now.sizes.map((_, layer) => layer), blocks = layers.slice(1);
    const shares = [...was(before.shares.attn), { name: "attention", values: now.shares.attn, color }, { name: "MLP", values: now.shares.mlp, color, dash: "9 3 2 3" },
                    { name: "bound", values: now.bounds.attn, color: "var(--ink)", dash: "1 4" }].filter(({ values }) => values.some(Number.isFinite));
    return {
      profile: { title: "size of the residual stream", y: "mean L2 norm of a token", xs: layers,
                 lines: [...was(before.sizes), { name: "now", values: now.sizes, color, label: changes }] },
      cost: { title: "what each block is worth", y: "nats a token lost without it", xs: blocks,
              bars: { name: "as trained", values: trained ?? blocks.map(() => null), color }, dots: changes ? { name: "as changed", values: costs ?? [] } : null },
      share: { title: now.bounds.attn.some(Number.isFinite) ? "share of tanh inputs beyond λ" : "share of flat tanh inputs", y: "of all inputs at a site", xs: blocks,
               percent: true, lines: shares },
    };
  }

  draw(charts, fits, changes) {
    const { before, now } = this, gap = now.loss - before.loss;
    this.root.classList.remove("loading");
    const loss = value => (Number.isFinite(value) ? value.toFixed(3) : "not finite");
    const delta = `<b class="${gap > 0.0005 ? "worse" : ""}">${gap < 0 ? "−" : "+"}${Math.abs(gap).toFixed(3)}</b>`;
    const guess = this.model.spec ? `; a guess costs ${Math.log(this.model.spec.vocab).toFixed(1)}` : "";
    this.loss.innerHTML = `loss <b>${loss(now.loss)}</b>${changes && Number.isFinite(gap) ? ` ${delta}` : ""}
      <small>nats a token${changes ? `; as trained ${loss(before.loss)}` : ", as trained"}${guess}</small>`;
    const width = this.profile.clientWidth || 320; // asked once: each answer after a drawing costs a layout of the page
    this.share.hidden = !charts.share.lines.length;
    this.cost.classList.toggle("stale", this.stale);
    this.cost.classList.toggle("other", !this.known);
    for (const [name, shown] of Object.entries(charts)) if (!this[name].hidden) chart(this[name], { ...shown, width }, fits[name]);
    [...this.text.children].forEach((word, place) => {
      const nats = place ? now.losses[place - 1] : 0, old = place ? before.losses[place - 1] : 0;
      const { heat, worse, title } = lossLook(nats, old, changes);
      word.style.setProperty("--heat", `${heat}%`);
      word.classList.toggle("worse", worse);
      word.title = place ? title : "the first token is not predicted";
    });
    this.drawNext();
  }

  drawNext() {
    const chances = ({ logits }) => {
      const most = logits.reduce((a, b) => Math.max(a, b), -Infinity), weights = Array.from(logits, logit => Math.exp(logit - most));
      const sum = weights.reduce((a, b) => a + b, 0);
      return weights.map(weight => weight / sum);
    };
    const old = chances(this.before), now = chances(this.now), word = token => this.data.words?.decode(token) ?? `#${token}`;
    const percent = chance => (Number.isFinite(chance) ? 100 * chance : 0);
    this.next.innerHTML = `<table><tbody>${likeliest(now, old).map(token => `<tr><th scope="row">${escapeText(JSON.stringify(word(token)).slice(1, -1)).replaceAll(" ", "␣")}</th>
      <td><i style="width:${percent(now[token])}%"></i><i class="old" style="width:${percent(old[token])}%"></i></td>
      <td class="value">${Number.isFinite(now[token]) ? `${percent(now[token]).toFixed(1)}%` : "not finite"}</td></tr>`).join("")}</tbody></table>`;
  }
}

function live(root, data, host) {
  root.classList.add("live");
  data.words = data.tokenizer ? bytePairs(data.tokenizer) : data.vocabulary && { decode: token => data.vocabulary[token] };
  const names = data.models.map(model => model.name), byName = Object.fromEntries(data.models.map(model => [model.name, model]));
  const has = (model, need) => !need || model.traits.includes(need);
  const [pair = { model: names[0], against: "" }] = data.pairs;
  const START = { model: pair.model, against: pair.against, text: 0, at: null, change: {}, step: data.tour ? 0 : null, field: "block" };
  const alone = model => (model === START.model ? START.against : ""); // with what a model is compared where nothing is said
  const begun = ({ ...told }) => ({ ...START, against: alone(told.model ?? START.model), ...told });
  let state = begun(host.read());
  if (!byName[state.model]) state.model = names[0];
  if (!byName[state.against]) state.against = "";
  state.change = tidy(state.change);
  if (!host.read().field) state.field = Object.keys(FIELDS).find(touched) ?? state.field;
  const panels = new Map(), ui = {};
  let typing = null;
  const labelled = (text, control) => element("label", {}, element("span", { textContent: text }), control);
  const chosen = (name, options) => {
    ui[name] = element("select", { name }, ...options.map(([value, text]) => new Option(text, value)));
    return ui[name];
  };
  const excerpt = tokens => { // from a line's start, where there is one
    if (!data.words) return `row of ${tokens.length} tokens`;
    const text = tokens.map(data.words.decode).join(""), line = text.slice(text.indexOf("\n") + 1).trim() || text;
    return line.replace(/\s+/g, " ").slice(0, 34) + "…";
  };

  ui.tour = element("section", { className: "tour", ariaLabel: "tour" });
  ui.fields = element("div", { className: "fields", role: "group", ariaLabel: "what to change" });
  ui.bank = element("div", { className: "bank" });
  ui.about = element("p", { className: "unit" });
  ui.own = element("textarea", { rows: 4, hidden: true, ariaLabel: "text of your own", spellcheck: false });
  ui.reset = element("button", { type: "button", textContent: "as trained", onclick: () => set({ change: {} }) });
  ui.guide = element("button", { type: "button", textContent: "tour", onclick: () => set({ step: 0 }) });
  ui.status = element("p", { className: "status", role: "status" });
  ui.panels = element("div", { className: "panels" });
  ui.rates = element("p", { className: "unit rates" });
  ui.pairs = element("div", { className: "fields pairs", role: "group", ariaLabel: "pairs of models at one learning rate", hidden: !data.pairs.length },
    ...data.pairs.map(({ label, model, against }) => element("button", { type: "button", textContent: label, onclick: () => set({ model, against }) })));
  const texts = data.passages.map(({ tokens, name }, place) => [place, name ?? `${place + 1}: ${excerpt(tokens)}`]);
  const models = data.models.map(({ name, label }) => [name, label]);
  root.replaceChildren(element("div", { className: "layout" }, ui.tour, element("section", { className: "controls", ariaLabel: "controls" }, ui.pairs,
    element("div", { className: "row" }, labelled("model", chosen("model", models)),
      ...(names.length > 1 ? [labelled("compare with", chosen("against", [["", "no other"], ...models]))] : []),
      labelled("reads", chosen("text", [...texts, ...(data.tokenizer ? [["own", "a text of your own"]] : [])]))),
    ui.own, ui.fields, ui.about, ui.bank, element("div", { className: "row" }, ui.reset, ui.guide, ui.status)), ui.rates, ui.panels));

  /* --- state: one way in --- */
  function set(changes, { quiet = false } = {}) {
    const old = state;
    state = { ...state, ...changes };
    state.change = tidy(state.change);
    const usual = { ...START, against: alone(state.model) };
    if (!quiet) host.write(Object.fromEntries(Object.entries(state).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(usual[name]))));
    showControls();
    if (old.step !== state.step) showTour();
    work();
  }
  const current = () => [state.model, state.against].filter((name, place, all) => name && all.indexOf(name) === place).map(name => byName[name]);
  const tokensNow = () => {
    if (typeof state.text === "string" && data.tokenizer) return data.words.encode(state.text).slice(0, Math.min(...current().flatMap(({ length, spec }) => [length, spec?.length ?? length])));
    return (data.passages[state.text] ?? data.passages[0]).tokens;
  };

  function showControls() {
    const depth = Math.max(...current().map(model => model.depth)), own = typeof state.text === "string";
    [ui.model.value, ui.text.value] = [state.model, own ? "own" : state.text];
    if (ui.against) ui.against.value = state.against;
    data.pairs.forEach(({ model, against }, place) => { ui.pairs.children[place].ariaPressed = model === state.model && against === state.against; });
    ui.rates.textContent = new Set(current().map(model => model.rate)).size > 1 ? "These models were trained at different learning rates: their sizes do not compare." : "";
    ui.own.hidden = !own;
    if (own && document.activeElement !== ui.own) ui.own.value = state.text;
    const possible = Object.entries(FIELDS).filter(([, { needs }]) => current().some(model => has(model, needs))).map(([name]) => name);
    if (!possible.includes(state.field)) state.field = possible[0];
    replaceButtons(ui.fields, ...possible.map(name => element("button", {
      type: "button", ariaPressed: name === state.field, title: FIELDS[name].about, textContent: name === "lam" ? byName[state.model].slope || "λ" : FIELDS[name].label,
      onclick: () => set({ field: name }), className: touched(name) ? "touched" : "",
    })));
    ui.about.textContent = FIELDS[state.field].about;
    const key = `${state.field} ${depth}`;
    if (ui.bank.dataset.key !== key) { // the sliders stay while one of them is moved
      ui.bank.dataset.key = key;
      ui.bank.replaceChildren(...["all", ...Array.from({ length: depth }, (_, place) => place + 1)].map(sliderOf));
    }
    for (const slider of ui.bank.querySelectorAll("input")) showValue(slider);
    ui.reset.disabled = !differs(state.change);
  }
  function touched(name) {
    return name in state.change || Object.values(state.change.layers ?? {}).some(own => name in own);
  }

  /* A fader for all blocks, and one for each. */
  function sliderOf(layer) {
    const { flag, factor, label } = FIELDS[state.field], range = factor ? { min: -OCTAVES, max: OCTAVES, step: 0.25 } : { min: 0, max: 1, step: 0.05 };
    const input = element("input", flag ? { type: "checkbox" } : { type: "range", ...range });
    input.dataset.layer = layer;
    input.setAttribute("aria-label", `${label}, ${layer === "all" ? "all blocks" : `block ${layer}`}`);
    input.addEventListener("input", () => {
      const value = flag ? input.checked : factor ? 2 ** +input.value : +input.value, { field, change } = state;
      const layers = structuredClone(change.layers ?? {});
      if (layer === "all") for (const own of Object.values(layers)) delete own[field];
      else layers[layer] = { ...layers[layer], [field]: value };
      set({ change: layer === "all" ? { ...change, [field]: value, layers } : { ...change, layers } });
    });
    return element("label", { className: layer === "all" ? "fader all" : "fader" }, element("output"), input, element("span", { textContent: layer }));
  }
  function showValue(input) {
    const { flag, factor } = FIELDS[state.field], { layer } = input.dataset;
    const value = layer === "all" ? { ...AS_IS, ...state.change }[state.field] : changeAt(state.change, layer)[state.field];
    if (flag) input.checked = value;
    else input.value = factor ? Math.max(-OCTAVES, Math.log2(value)) : value; // the logarithm of 0 is no place
    const text = flag ? (value ? "exact" : "carried") : factor ? `×${+value.toPrecision(2)}` : String(+value.toPrecision(2));
    input.parentElement.firstChild.value = text.replace("×", "");
    input.setAttribute("aria-valuetext", text);
    input.parentElement.classList.toggle("moved", value !== AS_IS[state.field]);
  }

  function showTour() {
    const steps = TOUR.filter(({ needs }) => data.models.some(model => has(model, needs)));
    const shown = state.step !== null && steps.length > 0;
    ui.guide.hidden = shown || !data.tour;
    root.classList.toggle("guided", shown);
    if (!shown) return ui.tour.replaceChildren();
    const place = Math.min(state.step, steps.length - 1), { title, say, act, needs, change } = steps[place];
    const button = (text, options) => element("button", { type: "button", textContent: text, ...options });
    const able = current().some(model => has(model, needs)) ? state.model : names.find(name => has(byName[name], needs));
    replaceButtons(ui.tour,
      element("p", { className: "count", textContent: `${place + 1} of ${steps.length}` }), element("h2", { textContent: title }), element("p", { textContent: say }),
      element("div", { className: "row" }, button(act, { className: "primary", onclick: () => set({ model: able, change, field: Object.keys(change.layers?.[1] ?? change)[0] }) }),
        button("back", { disabled: place === 0, onclick: () => set({ step: place - 1, change: {} }) }),
        button("next", { disabled: place === steps.length - 1, onclick: () => set({ step: place + 1, change: {} }) }),
        button("close", { onclick: () => { set({ step: null }); ui.guide.focus(); } })));
  }

  /* --- work: one request at a time, always of the latest state --- */
  let busy = false, wanted = false, closed = false, rest = null;
  async function work() {
    wanted = true;
    if (busy) return;
    busy = true;
    clearTimeout(rest);
    try {
      while (wanted && !closed) {
        wanted = false;
        await answer();
      }
      rest = setTimeout(measureCosts, COSTS_AFTER_MS);
    } catch (error) {
      ui.status.textContent = error.message;
    } finally {
      busy = false;
    }
  }
  async function measureCosts() {
    try {
      const { change } = state;
      await Promise.all([...panels.values()].map(panel => panel.measure(change, () => busy || closed)));
      if (!busy && !closed) draw();
    } catch (error) {
      ui.status.textContent = error.message;
    }
  }
  /* All that have answered, on the same axes. */
  function draw() {
    const changes = differs(state.change), shown = [...panels.values()].filter(panel => panel.now).map(panel => ({ panel, charts: panel.charts(changes) }));
    const fits = Object.fromEntries(["profile", "cost", "share"].map(name => [name, shown.flatMap(({ charts }) => fitted(charts[name]))]));
    for (const { panel, charts } of shown) panel.draw(charts, fits, changes);
  }
  async function answer() {
    const models = current(), tokens = tokensNow(), { change } = state;
    for (const [name, panel] of panels) if (!models.some(model => model.name === name)) {
      panel.engine?.close();
      panel.root.remove();
      panels.delete(name);
    }
    if (tokens.length < 2) {
      ui.status.textContent = "write at least two tokens";
      return;
    }
    const at = placeIn(tokens, state.at);
    for (const model of models) if (!panels.has(model.name)) {
      const panel = new Panel(model, data, place => set({ at: place }));
      panels.set(model.name, panel);
      panel.root.style.setProperty("--light", model.colors.light);
      panel.root.style.setProperty("--dark", model.colors.dark);
    }
    const shown = models.map(model => panels.get(model.name));
    if (shown.some(({ root }, place) => ui.panels.children[place] !== root)) ui.panels.replaceChildren(...shown.map(panel => panel.root));
    await Promise.all(shown.map(async panel => {
      panel.write(tokens, at);
      try {
        if (!panel.engine) await panel.begin(host);
      } catch (error) { // the next move tries again
        panel.engine = null;
        panel.loss.textContent = "not loaded";
        throw error;
      }
      await panel.answer(change, at);
      if (panel.root.classList.contains("loading")) draw(); // while another still loads
    }));
    draw();
    const [first] = shown;
    ui.status.textContent = `${tokens.length} tokens; ${first.now.computed ?? "all"} of ${first.model.depth} blocks computed in ${Math.round(first.took)} ms`;
    root.dispatchEvent(new CustomEvent("answered"));
  }
  ui.model.addEventListener("change", () => set({ model: ui.model.value }));
  ui.against?.addEventListener("change", () => set({ against: ui.against.value }));
  ui.text.addEventListener("change", () => {
    clearTimeout(typing);
    set({ text: ui.text.value === "own" ? "def add(first, second):\n    \"\"\"Return the sum of" : +ui.text.value, at: null });
  });
  ui.own.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => set({ text: ui.own.value, at: null }), 250);
  });
  const sized = new ResizeObserver(draw);
  sized.observe(ui.panels);
  showControls();
  showTour();
  work();
  return {
    set: changes => set(changes, { quiet: true }), begin: told => set(begun(told), { quiet: true }), state: () => state,
    close() {
      closed = true;
      clearTimeout(rest);
      clearTimeout(typing);
      sized.disconnect();
      for (const panel of panels.values()) panel.engine?.close();
    },
  };
}
