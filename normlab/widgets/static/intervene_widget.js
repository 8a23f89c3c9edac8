/* The model's page in a notebook. The model runs in the browser; where the page does not compute it, the kernel answers. */
export default widgetOf({ change: "change", text: "row", at: "token" }, (root, host, model) => {
  const data = model.get("data");
  const kernel = { last: null, close() {} };
  kernel.ask = (tokens, change, at) => host.ask(kernel.last = { tokens, change, at });
  kernel.without = layer => {
    const { change, ...rest } = kernel.last, layers = { ...change.layers, [layer]: { ...change.layers?.[layer], block: 0 } };
    return host.ask({ ...rest, change: { ...change, layers } }).then(answer => answer.loss);
  };
  const weights = () => { // a copy: the bytes go to the worker
    const { buffer, byteOffset, byteLength } = model.get("weights");
    return buffer.slice(byteOffset, byteOffset + byteLength);
  };
  return live(root, data, { ...host, weights, engine: about => (about.spec ? null : kernel) });
});
