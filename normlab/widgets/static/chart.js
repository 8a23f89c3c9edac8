/* Small charts by layer, drawn as SVG: lines with their names at the end, or bars. */
const HEIGHT = 220;
const escapeText = text => String(text).replace(/[&<>"]/g, letter => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);

function niceStep(span) {
  const power = 10 ** Math.floor(Math.log10(span / 3 || 1));
  return [1, 2, 5, 10].map(factor => factor * power).find(step => span / step <= 4) ?? power;
}

/* The values that a chart's axis fits: those of its lines, or of its bars. */
const fitted = ({ lines = [], bars = null }) => (bars ? [bars] : lines).flatMap(one => one.values).filter(Number.isFinite);

/* chart(element, { title, y, xs, width, lines: [{ name, values, color, dash }], bars: { name, values, color }, dots: { name, values } }, fits)
   A value of null is a gap. `percent`: the axis counts shares. `fits`: the values that the axis has room for. A dot is a mark over a
   bar, and lies at the axis' end where it is beyond. */
function chart(element, { title, y, xs, width, lines = [], bars = null, dots = null, percent = false }, fits) {
  const series = bars ? [bars, ...(dots ? [dots] : [])] : lines, labelled = lines.filter(line => line.label !== false);
  const box = { left: 46, right: labelled.length ? 92 : 12, top: bars ? 30 : 14, bottom: 38 };
  const low = Math.min(0, ...fits), high = Math.max(...fits, low + (percent ? 0.01 : 0.1));
  const step = niceStep(high - low), top = Math.ceil(high / step) * step;
  const inner = width - box.left - box.right, pad = bars ? 0.5 : 0;
  const px = x => box.left + inner * (x - xs[0] + pad) / (xs.at(-1) - xs[0] + 2 * pad || 1);
  const py = value => box.top + (HEIGHT - box.top - box.bottom) * (top - value) / (top - low);
  const written = value => (percent ? `${+(100 * value).toPrecision(3)}%` : String(+value.toPrecision(4)).replace("-", "−"));
  const parts = [];
  for (let tick = Math.ceil(low / step) * step; tick <= top + step / 2; tick += step)
    parts.push(`<line class="grid" x1="${box.left}" x2="${width - box.right}" y1="${py(tick)}" y2="${py(tick)}"/>`,
               `<text class="tick" x="${box.left - 6}" y="${py(tick) + 4}" text-anchor="end">${written(+tick.toPrecision(12))}</text>`);
  const every = Math.ceil(xs.length / (inner / 26));
  for (const x of xs) if ((x - xs[0]) % every === 0) parts.push(`<text class="tick" x="${px(x)}" y="${HEIGHT - box.bottom + 16}" text-anchor="middle">${x}</text>`);
  parts.push(`<text class="tick" x="${box.left + inner / 2}" y="${HEIGHT - 6}" text-anchor="middle">layer</text>`);
  const slot = 0.8 * inner / xs.length;
  bars?.values.forEach((value, place) => {
    if (!Number.isFinite(value)) return;
    const left = px(xs[place]) - slot / 2 + 1, [upper, lower] = [py(Math.max(value, 0)), py(Math.min(value, 0))];
    parts.push(`<rect class="bar" fill="${bars.color}" x="${left}" y="${upper}" width="${Math.max(slot - 2, 1)}" height="${Math.max(lower - upper, 1)}" rx="2"/>`);
  });
  dots?.values.forEach((value, place) => {
    if (!Number.isFinite(value)) return;
    const within = Math.max(low, Math.min(value, top)), x = px(xs[place]), y = py(within), up = value > top ? -6 : 6;
    parts.push(value === within ? `<circle class="dot" cx="${x}" cy="${y}" r="4.5"/>`
      : `<path class="dot" d="M${x - 5} ${y}h10l-5 ${up}z"/>`);
  });
  if (dots) parts.push(`<rect fill="${bars.color}" x="${box.left}" y="5" width="10" height="10" rx="2"/><text class="tick" x="${box.left + 15}" y="14">${escapeText(bars.name)}</text>`,
                       `<circle class="dot" cx="${box.left + 100}" cy="10" r="4.5"/><text class="tick" x="${box.left + 110}" y="14">${escapeText(dots.name)}</text>`);
  for (const { values, color, dash } of lines) {
    const path = values.map((value, place) => {
      const pen = Number.isFinite(values[place - 1]) ? "L" : "M";
      return Number.isFinite(value) ? `${pen}${px(xs[place]).toFixed(1)} ${py(value).toFixed(1)}` : "";
    });
    parts.push(`<path class="line" d="${path.join("")}" stroke="${color}" stroke-dasharray="${dash ?? ""}"/>`);
  }
  const named = labelled.map(({ name, color, values }) => ({ name, color, y: py(values.findLast(Number.isFinite)) }));
  named.sort((a, b) => a.y - b.y).forEach((label, place) => { // names do not overlap
    if (place) label.y = Math.max(label.y, named[place - 1].y + 14);
    label.y = Math.min(label.y, HEIGHT - box.bottom + 4 - 14 * (named.length - 1 - place));
    if (Number.isFinite(label.y)) parts.push(`<text class="name" fill="${label.color}" x="${width - box.right + 7}" y="${label.y + 4}">${escapeText(label.name)}</text>`);
  });
  const said = series.map(({ name, values }) => `${name}: ${values.map(value => (Number.isFinite(value) ? written(value) : "none")).join(", ")}`).join("; ");
  element.innerHTML = `<h3>${escapeText(title)}</h3><p class="unit">${escapeText(y)}</p>
    <svg width="${width}" height="${HEIGHT}" role="img" aria-label="${escapeText(`${title}, ${y}. ${said}`)}">${parts.join("")}</svg>`;
  const unit = element.querySelector(".unit");
  element.onpointermove = event => { // values of the layer under the pointer, in place of the unit
    const x = xs.reduce((best, x) => Math.abs(px(x) - event.offsetX) < Math.abs(px(best) - event.offsetX) ? x : best, xs[0]), place = xs.indexOf(x);
    unit.textContent = `layer ${x}: ${series.filter(one => Number.isFinite(one.values[place])).map(one => `${one.name} ${written(one.values[place])}`).join(", ")}`;
  };
  element.onpointerleave = () => { unit.textContent = y; };
}
