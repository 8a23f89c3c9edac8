/* The explorer: a metric by layer for all schemes, in a page and in a notebook.

   explorer(root, data, host)
     data   choices, schemes and colours: normlab/widgets/explorer.py, `page_data`
     host   { Plotly (or a promise of it), read() -> state, write(state), view(key, theory) -> drawings or a promise of them }
   A state is { metric, site, mask, way, depth, step, rate, schemes, band, log, theory, published }. A view's drawings hold every
   step: moving the step puts one step's numbers in place of another's. A rate of null is each scheme's best. */
const SWITCHES = { band: "seeds / interval", log: "log axis", theory: "theory", published: "published values" };
const CHOICES = { metric: "metric", site: "at", mask: "tokens", way: "shown as" };
const SLIDERS = ["depth", "step", "rate"];
const PLAY_MS = 350;
const NARROW = 720; // pixels of a plot: names of lines then stand below it
const LETTER = { title: 9.8, small: 6.4 }, LINE = 24; // pixels: a letter of a title, a line of it

/* The key of a view, as normlab/widgets/explorer.py writes it. */
function viewKey(data, { site, metric, mask, depth, rate, way }) {
  const [name] = data.rates[depth].find(([, value]) => value === rate) ?? data.rates[depth][0];
  return [site, metric, mask, depth, name, way].join("|");
}
/* Words in lines of so many letters; a tag has none. */
function lines(text, letters) {
  return text.split(" ").reduce((found, word) => {
    const longer = found.length ? `${found.at(-1)} ${word}` : word;
    return found.length && longer.replace(/<[^>]*>/g, "").length <= letters ? [...found.slice(0, -1), longer] : [...found, word];
  }, []);
}
/* A title and the small lines under it, broken anew for a plot of that width. */
function wrapped(title, width) {
  const [, head, open, where, about] = title.match(/^(.*?)<br>(<span[^>]*>)(.*?)(?:<br>(.*))?<\/span>$/s) ?? [null, title, "", "", ""];
  const small = [where, (about ?? "").replaceAll("<br>", " ")].filter(Boolean).flatMap(text => lines(text, (width - 50) / LETTER.small));
  return [...lines(head, (width - 50) / LETTER.title), ...small.map(line => `${open}${line}</span>`)];
}

/* What a view says of itself under the switches: its title, with words on what is shaded where a band is drawn; remarks, without those
   of schemes that are away. */
function titleOf(view, frame, { schemes, band }) {
  const { title } = { ...view?.layout, ...frame?.layout };
  const isShaded = band && view.traces.some(({ name }) => name.endsWith(" band") && frame?.data[name] && schemes.includes(partsOf(name)[0]));
  return isShaded ? { ...title, text: title.text.replace(view.about[0], () => view.about[1]) } : title;
}
function remarksOf(data, view, frame, { schemes, log, theory }) {
  const away = data.schemes.filter(({ name }) => !schemes.includes(name)).map(({ title }) => title + ": ");
  const said = [...(frame?.remarks ?? []), ...((log && frame?.unseen) || [])].filter(remark => !away.some(start => remark.startsWith(start)));
  return [...said, schemes.length && view?.remarks.unlike, theory && view?.remarks.theory, log && view?.remarks.log].filter(Boolean);
}
/* A template with a layout over it: plotly would put the two together at every move. */
function merged(below, above) {
  const part = key => below[key] && above[key] && typeof below[key] === "object" && typeof above[key] === "object" ? merged(below[key], above[key]) : above[key] ?? below[key];
  return Object.fromEntries(Object.keys({ ...below, ...above }).map(key => [key, Array.isArray(above[key]) ? above[key] : part(key)]));
}
/* What a trace shows: "<scheme>", "<scheme> band" or "<scheme> theory". */
function partsOf(name) {
  const part = ["band", "theory"].find(ending => name.endsWith(" " + ending));
  return [part ? name.slice(0, -part.length - 1) : name, part];
}
/* The labels of the schemes that are shown. */
function someLabels(labels, titles) {
  const kept = labels.text.map((_, place) => place).filter(place => titles.has(labels.text[place].trim()));
  const pick = list => kept.map(place => list[place]);
  return { ...labels, x: pick(labels.x), y: pick(labels.y), text: pick(labels.text), textfont: { ...labels.textfont, color: pick(labels.textfont.color) } };
}
/* The published values of the schemes that are shown, with the axes' ranges that show them; null without any. */
function somePublished(published, schemes) {
  const kept = (published?.schemes ?? []).map((_, place) => place).filter(place => schemes.includes(published.schemes[place]));
  if (!kept.length) return null;
  const pick = list => kept.map(place => list[place]), { trace } = published, x = pick(trace.x);
  const errors = { ...trace.error_y, array: pick(trace.error_y.array) }, marker = { ...trace.marker, color: pick(trace.marker.color) };
  const ranges = Object.fromEntries(Object.entries(published.ranges).map(([kind, own]) => [kind, around(schemes.map(name => own[name]))]));
  return { trace: { ...trace, x, y: pick(trace.y), text: pick(trace.text), error_y: errors, marker }, ranges, deepest: Math.max(...x), remark: published.remark };
}
/* One range around all of these that are there; null without any. */
function around(ranges) {
  const known = ranges.filter(Boolean);
  return known.length ? [Math.min(...known.map(range => range[0])), Math.max(...known.map(range => range[1]))] : null;
}

/* One view: its controls and its plot. `told` hears of every state; `beside` gives the value axes of the other views. */
function explorerPane(data, host, state, told, beside) {
  const root = document.createElement("div");
  root.className = "pane";
  const choice = name => `<label>${CHOICES[name]} <select name="${name}"></select></label>`;
  root.innerHTML = `
    <div class="row what">${choice("metric")}${choice("site")}<span class="row schemes"></span></div>
    <div class="row moves">${SLIDERS.map(name => `<label>${name} <input name="${name}" type="range" min="0" step="1"><output></output></label>
      ${name === "step" ? '<button name="play" type="button">play</button>' : ""}`).join("")}<button name="more" type="button" aria-expanded="false">more</button></div>
    <div class="fold" hidden>
      <div class="row">${choice("mask")}${choice("way")}
        ${Object.entries(SWITCHES).map(([name, text]) => `<label><input name="${name}" type="checkbox"> ${text}</label>`).join("")}</div>
      <div class="families"></div>
      <div class="row exports">${["PNG", "SVG", "CSV", "code"].map(kind => `<button type="button" name="${kind}">${kind}</button>`).join("")}</div><pre hidden></pre>
    </div>
    <div class="plot" role="img"></div><div class="remarks" role="status"></div>`;
  const at = name => root.querySelector(`[name="${name}"]`), find = selector => root.querySelector(selector);
  const plot = plotter(host.Plotly, find(".plot"));
  let now = null, drawn = null, asked = null, timer = null, closed = false, own = null, aligned = "", width = 0;
  const key = () => viewKey(data, state);
  const options = { metric: () => data.metrics, site: () => data.sites[state.metric], mask: () => data.masks[`${state.site}|${state.metric}`], way: () => data.ways };
  const shown = () => data.schemes.filter(({ name }) => state.schemes.includes(name));
  const inked = part => host.dark()
    ? JSON.parse(Object.entries(data.on_dark).reduce((text, [light, bright]) => text.replaceAll(light, bright), JSON.stringify(part))) : part;

  /* What may be chosen depends on the choices before it; each choice that still exists stays. */
  function offer(name, choices) {
    if (!choices.some(([, value]) => value === state[name])) state[name] = choices[0]?.[1];
    const text = JSON.stringify(choices);
    if (at(name).dataset.options !== text) at(name).replaceChildren(...choices.map(([label, value]) => new Option(label, value)));
    at(name).dataset.options = text;
    at(name).value = state[name];
  }
  async function refresh() {
    for (const name of Object.keys(options)) offer(name, options[name]());
    if (!data.depths.includes(state.depth)) state.depth = data.start;
    for (const name of Object.keys(SWITCHES)) at(name).checked = state[name];
    at("published").disabled = !data.published;
    const rates = data.rates[state.depth].map(([, value]) => value);
    if (!rates.includes(state.rate)) state.rate = null;
    at("rate").parentElement.hidden = rates.length === 1;
    for (const [name, places, value] of [["depth", data.depths, state.depth], ["rate", rates, state.rate]]) {
      at(name).max = places.length - 1;
      at(name).value = places.indexOf(value);
    }
    for (const box of root.querySelectorAll(".scheme input")) box.checked = state.schemes.includes(box.value);
    const wanted = `${key()} ${state.theory}`;
    asked = wanted;
    let found = host.view(key(), state.theory); // what is here is drawn at once
    try {
      if (found instanceof Promise) found = await found;
    } catch (error) {
      find(".remarks").textContent = error.message;
      return;
    }
    if (asked !== wanted || closed) return; // another was asked for meanwhile
    now = found;
    const steps = now?.steps ?? [];
    if (steps.length && !steps.includes(state.step)) state.step = steps.at(-1);
    at("step").max = Math.max(0, steps.length - 1);
    at("step").value = steps.indexOf(state.step);
    draw();
  }

  /* For views of the same quantity one value axis, of the view that needs most room, or around all; below the longest title. */
  function shared() {
    const above = Math.max(own.above, ...beside().map(other => other.above)), alike = [own, ...beside().filter(other => other.what === own.what)].filter(({ axis }) => axis.range);
    if (!alike.length) return { axis: own.axis, above };
    const range = [Math.min(...alike.map(({ axis }) => axis.range[0])), Math.max(...alike.map(({ axis }) => axis.range[1]))];
    return { axis: alike.find(({ axis }) => String(axis.range) === String(range))?.axis ?? { ...own.axis, range, tickmode: "auto" }, above };
  }
  function draw() {
    const frame = now?.frames[now.steps.indexOf(state.step)], kind = state.log ? "log" : "linear", { depth, step } = state;
    const printed = state.published ? somePublished(now?.published, state.schemes) : null, all = shown().length === data.schemes.length;
    at("log").disabled = now?.axes.linear?.type === "log"; // ratios have no other
    // With fewer lines the linear axis fits those; their names, placed for the whole axis, go into a legend. So with published values.
    const fits = shown().length && (printed || (kind === "linear" && !all));
    const axis = { ...now?.axes[kind] };
    if (fits) {
      const ranges = shown().flatMap(({ name }) => [now.ranges[name], state.theory && now.predicted[name]]);
      const range = around([...(kind === "linear" ? ranges : [axis.range]), printed?.ranges[kind]]);
      if (range) axis.range = range;
      axis.tickmode = "auto";
    }
    width = find(".plot").clientWidth;
    const narrow = width < NARROW, title = now && titleOf(now, frame, state), heading = narrow ? wrapped(title?.text ?? "", width) : [];
    own = { what: `${state.metric}|${state.way}|${axis.type}`, axis, above: Math.max(0, heading.length - 3) * LINE };
    const common = shared(), legend = fits || narrow || common.axis !== axis; // names at lines' ends are placed for their own axis
    aligned = JSON.stringify(common);
    const titles = Object.fromEntries(shown().map(({ name, title }) => [name, title])), traces = [];
    drawn = [];
    for (const trace of now?.traces ?? []) {
      const [scheme, part] = partsOf(trace.name), numbers = frame?.data[trace.name];
      if (!numbers || !(scheme in titles) || (part && !state[part])) continue;
      if (!part) drawn.push({ ...trace, ...numbers });
      traces.push(inked({ ...trace, ...numbers, ...(legend ? { name: titles[scheme], showlegend: !part } : {}) }));
    }
    if (printed && traces.length) traces.push(inked(printed.trace));
    if (!legend) traces.push(...(frame?.labels[kind] ?? []).map(labels => inked(someLabels(labels, new Set(Object.values(titles))))));
    const layout = merged(data.templates[host.dark() ? "dark" : "light"].layout, { ...now?.layout, ...frame?.layout, title, yaxis: common.axis });
    if (legend) Object.assign(layout, { showlegend: true, legend: { x: 1.02, y: 1, yanchor: "top" } });
    if (narrow) place(layout, traces, heading, common.above);
    if (printed && layout.xaxis?.range) layout.xaxis = { ...layout.xaxis, range: [layout.xaxis.range[0], Math.max(layout.xaxis.range[1], printed.deepest)] };
    if (!traces.length && !now?.layout?.annotations)
      layout.annotations = [{ text: shown().length ? "None of these schemes was measured here." : "No scheme is selected.", showarrow: false,
                              xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: 14, color: "#8a8f98" } }];
    for (const [name, value] of [["depth", depth], ["step", step ?? ""], ["rate", state.rate ?? "best"]]) {
      at(name).nextElementSibling.value = value;
      at(name).setAttribute("aria-valuetext", value);
    }
    find(".plot").setAttribute("aria-label", `${at("metric").selectedOptions[0]?.text} by layer, depth ${depth}, step ${step ?? "none"}`);
    find(".remarks").textContent = [...remarksOf(data, now, frame, state), printed && printed.remark].filter(Boolean).join(" · ");
    plot.show({ data: traces, layout: structuredClone(layout) }); // plotly writes into what it draws
    if (!find("pre").hidden) find("pre").textContent = code();
    told(state);
  }

  /* In a narrow plot the title takes more lines, and the names stand below in rows. */
  function place(layout, traces, heading, above) {
    const named = traces.filter(trace => trace.showlegend).map(({ name }) => name);
    const sizes = named.map(name => 56 + LETTER.small * name.length), room = width - 76; // plotly's columns are equal, but in a single row
    const rows = sizes.reduce((sum, size) => sum + size, 0) < room ? 1 : Math.ceil(sizes.length / Math.max(1, Math.floor(room / Math.max(...sizes))));
    const below = rows * 20 + 14;
    layout.title = { ...layout.title, text: heading.join("<br>") };
    layout.margin = { ...layout.margin, r: 16, l: 60, t: layout.margin.t + above, b: layout.margin.b + below };
    layout.height += above + below;
    layout.legend = { orientation: "h", x: 0, xanchor: "left", y: -44 / (layout.height - layout.margin.t - layout.margin.b), yanchor: "top" };
  }

  /* A change by the reader, or by Python. */
  function set(changes) {
    Object.assign(state, changes);
    refresh();
  }

  const rows = {};
  for (const [family, names] of Object.entries(data.families)) {
    const row = Object.assign(document.createElement("div"), { className: "row", textContent: family + ":" });
    find(".families").append(row);
    for (const name of names) rows[name] = row;
  }
  const paints = [];
  for (const { name, title, control, color } of data.schemes) {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", value: name }), tag = document.createElement("label");
    tag.className = "scheme";
    tag.append(box, title);
    if (control) tag.title = "a control";
    paints.push(() => { tag.style.color = inked(color); });
    box.addEventListener("change", () => {
      const names = data.schemes.map(scheme => scheme.name);
      set({ schemes: names.filter(other => (other === name ? box.checked : state.schemes.includes(other))) });
    });
    (rows[name] ?? find(".schemes")).append(tag);
  }
  const stop = () => {
    clearInterval(timer);
    timer = null;
    at("play").textContent = "play";
  };
  for (const name of Object.keys(CHOICES)) at(name).addEventListener("change", () => set({ [name]: at(name).value }));
  at("depth").addEventListener("input", () => set({ depth: data.depths[+at("depth").value] }));
  at("rate").addEventListener("input", () => set({ rate: data.rates[state.depth][+at("rate").value][1] }));
  at("more").addEventListener("click", () => {
    find(".fold").hidden = !find(".fold").hidden;
    at("more").setAttribute("aria-expanded", !find(".fold").hidden);
  });
  at("step").addEventListener("input", event => {
    if (event.isTrusted) stop(); // moved by the reader
    if (now) set({ step: now.steps[+at("step").value] });
  });
  for (const name of Object.keys(SWITCHES)) at(name).addEventListener("change", () => set({ [name]: at(name).checked }));
  at("play").addEventListener("click", () => {
    if (timer || !now) return stop();
    at("play").textContent = "stop";
    if (state.step === now.steps.at(-1)) set({ step: now.steps[0] });
    timer = setInterval(() => {
      const next = now.steps[now.steps.indexOf(state.step) + 1];
      next === undefined || closed ? stop() : set({ step: next });
    }, PLAY_MS);
  });

  /* The view as an image, its numbers, and the lines that make it again in Python. */
  const name = () => [state.metric, state.site, state.mask === "all" ? "" : state.mask, `depth${state.depth}`, `step${state.step}`,
    state.rate === null ? "" : `rate${state.rate}`, state.way === "absolute" ? "" : state.way].filter(Boolean).join("-").replace(/[^\w-]/g, "-");
  const python = value => (value === true ? "True" : value === false ? "False" : JSON.stringify(value));
  for (const format of ["png", "svg"])
    at(format.toUpperCase()).addEventListener("click", async () => (await host.Plotly).downloadImage(find(".plot"), { format, filename: name(), width: 1280, height: 520 }));
  at("CSV").addEventListener("click", () => {
    const lines = drawn.flatMap(({ name: scheme, x, y, customdata }) => x.map((layer, place) => [scheme, layer, y[place] ?? "", ...(customdata?.[place] ?? ["", ""])].join(",")));
    const link = Object.assign(document.createElement("a"), { download: `${name()}.csv` });
    link.href = URL.createObjectURL(new Blob([["scheme,layer,value,low,high", ...lines, ""].join("\n")], { type: "text/csv" }));
    link.click();
  });
  const code = () => {
    const way = { absolute: {}, relative: { relative: true } }[state.way] ?? { reference: state.way };
    const options = { site: state.site, mask: state.mask, depth: state.depth, step: state.step, schemes: state.schemes, ...way, band: state.band, log: state.log, theme: host.dark() ? "dark" : "light" };
    if (state.schemes.length === data.schemes.length) delete options.schemes;
    const given = Object.entries(options).map(([option, value]) => `${option}=${python(value)}`);
    if (data.rates[state.depth].length > 1) given.push(`rate=${state.rate ?? '"best"'}`);
    if (state.theory) given.push(`theory=normlab.read_configs(${python(data.source)})`);
    if (state.published) given.push("published=normlab.load_published()");
    return `import normlab\nruns = normlab.load_runs(${python(data.source)}, variants=False)\nnormlab.figures.profile(runs, ${python(state.metric)}, ${given.join(", ")})`;
  };
  at("code").addEventListener("click", () => {
    find("pre").textContent = code();
    find("pre").hidden = false;
  });

  const sized = new ResizeObserver(() => { if (now && find(".plot").clientWidth !== width) draw(); });
  sized.observe(find(".plot"));
  const paint = () => {
    paints.forEach(one => one());
    if (now) requestAnimationFrame(() => closed || draw()); // while JupyterLab changes its theme the plot has no width
  };
  paint();
  refresh();
  return {
    root, set, paint, state: () => ({ ...state }), axis: () => own, steps: () => now?.steps ?? [],
    align() { // to views beside it
      if (own && JSON.stringify(shared()) !== aligned) draw();
    },
    close() {
      closed = true;
      stop();
      sized.disconnect();
      plot.remove();
    },
  };
}

function explorer(root, data, host) {
  root.classList.add("explorer");
  if (data.missing) {
    root.textContent = data.missing;
    return { set() {}, state: () => ({}), paint() {}, close() {} };
  }
  const start = { metric: null, site: null, mask: "all", way: "absolute", depth: data.start, step: null, rate: data.rate, schemes: data.shown, band: true, log: data.log, theory: false, published: false };
  const panes = [], place = Object.assign(document.createElement("div"), { className: "panes" });
  const compare = Object.assign(document.createElement("button"), { type: "button", name: "compare", textContent: "compare" });
  const add = state => {
    const rank = panes.length, others = () => panes.filter((_, other) => other !== rank);
    const pane = explorerPane(data, host, state, now => {
      if (!rank) host.write(now);
      others().forEach(other => other.align());
    }, () => others().map(other => other.axis()).filter(Boolean));
    panes.push(pane);
    place.append(pane.root);
    return pane;
  };
  /* The second view opens on something else: another depth, or the first step. */
  function different(state, steps) {
    const depth = data.depths.findLast(depth => depth !== state.depth);
    return { ...state, ...(depth === undefined ? { step: steps.find(step => step !== state.step) ?? state.step } : { depth }) };
  }
  compare.addEventListener("click", () => {
    if (panes.length === 1) add(different(panes[0].state(), panes[0].steps()));
    else {
      const second = panes.pop();
      second.close();
      second.root.remove();
      panes[0].align();
    }
    compare.textContent = panes.length === 1 ? "compare" : "one view";
  });
  root.replaceChildren(place);
  add({ ...start, ...host.read() }).root.querySelector(".moves").append(compare);
  return {
    set: changes => panes[0].set(changes), state: () => panes[0].state(), paint: () => panes.forEach(pane => pane.paint()),
    close: () => panes.forEach(pane => pane.close()),
  };
}
