/* The explorer as a page: its data lie in the page, its state in the address. */
const BEST = "best"; // the rate of each scheme, in the address
read.then(data => {
  const { schemes, dark, ...rest } = readAddress();
  const typed = (name, text) => (text === BEST ? null : name in SWITCHES ? text === "1" : SLIDERS.includes(name) ? +text : text);
  const state = Object.fromEntries(Object.entries(rest).map(([name, text]) => [name, typed(name, text)]));
  if (schemes !== undefined) state.schemes = schemes.split(",");
  const write = now => writeAddress(Object.fromEntries(Object.entries({ ...now, rate: now.rate ?? (data.rate === null ? null : BEST) }).filter(([, value]) => value !== null).map(([name, value]) => [name, typeof value === "boolean" ? +value : value])));
  let page = null;
  followDark(() => page?.paint());
  page = explorer(root, data, { Plotly, dark: isDark, read: () => state, write, view: key => data.views[key] });
});
