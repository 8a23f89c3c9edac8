/* The models as a page: weights lie in its folder, its state in the address: #model=bhyt-d8&all=kappa:0.5&3=block:0,mlp:0.5 */
const fieldsOf = text => Object.fromEntries(text.split(",").map(part => part.split(":")).filter(([name]) => Object.hasOwn(AS_IS, name))
  .map(([name, value]) => [name, name === "exact" ? value === "true" : +value]).filter(([, value]) => !Number.isNaN(value)));
const textOf = fields => Object.entries(fields).map(([name, value]) => `${name}:${typeof value === "number" ? +value.toPrecision(6) : value}`).join(",");

function readState() {
  const { all = "", own, text, at, step, dark, ...rest } = readAddress(), state = { change: fieldsOf(all) };
  const isLayer = ([name]) => /^\d+$/.test(name), parts = Object.entries(rest);
  state.change.layers = Object.fromEntries(parts.filter(isLayer).map(([layer, fields]) => [layer, fieldsOf(fields)]));
  Object.assign(state, Object.fromEntries(parts.filter(part => !isLayer(part))));
  if (text) state.text = +text;
  if (own !== undefined) state.text = own;
  const isCount = text => /^\d+$/.test(text);
  if (isCount(at)) state.at = +at;
  if (step === "none" || isCount(step)) state.step = step === "none" ? null : +step;
  return state;
}
function writeState({ change: { layers = {}, ...all } = {}, text, step, ...values }) {
  if (typeof text === "string") values.own = text;
  else if (text !== undefined) values.text = text;
  if (step !== undefined) values.step = step ?? "none";
  if (differs(all)) values.all = textOf(all);
  for (const [layer, fields] of Object.entries(layers)) values[layer] = textOf(fields);
  writeAddress(values);
}

/* A file of 16-bit numbers whose low bytes come first, then all high bytes, which compress better by themselves. */
const WEIGHTS = {};
async function interleaved(planes) {
  const packed = new Uint8Array(await planes), bytes = new Uint8Array(packed.length), half = (packed.length + 1) >> 1;
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed[(i >> 1) + (i % 2) * half];
  return bytes.buffer;
}
const weights = name => new Promise((resolve, reject) => document.head.append(element("script", {
  src: `${encodeURIComponent(name)}.js`, onload: () => resolve(interleaved(unzip(WEIGHTS[name]).arrayBuffer())),
  onerror: () => reject(new Error(`the weights are missing: ${name}.js has to lie in this page's folder`)),
})));

followDark(() => {});
read.then(data => {
  const page = live(root, data, { read: readState, write: writeState, weights });
  addEventListener("hashchange", () => {
    written = readAddress();
    page.begin(readState());
  });
});
