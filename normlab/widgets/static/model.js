/* A trained model's forward pass under a change, in the order in which the data meet it.

   new LiveModel(spec, buffer, kernel)   spec: normlab/widgets/live.py; buffer: model.safetensors; kernel: matmul.wasm or null
   model.ask(tokens, change, position)   loss, loss by token, layer sizes, tanh shares, logits at a position
   model.without(layer)                  loss without one block, the last change kept
   A change is the JSON of normlab.widgets.change.Change. All arrays live in one heap, so offsets count 32-bit floats. */
const AS_IS = { lam: 1, kappa: 1, gain: 1, exact: false, block: 1, attention: 1, mlp: 1 };

function changeAt({ layers = {}, ...all }, layer) {
  return { ...AS_IS, ...all, ...layers[layer] };
}

/* The kernel takes 4 rows and 8 columns at a time. */
function padded(count) {
  return Math.ceil(count / 8) * 8;
}

/* Tensors of a safetensors file: name -> { shape, data }, bfloat16 widened to 32 bits. */
function readSafetensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const read = ({ dtype, shape, data_offsets: [start, end] }) => {
    const bytes = buffer.slice(8 + size + start, 8 + size + end);
    if (dtype === "F32") return { shape, data: new Float32Array(bytes) };
    if (dtype !== "BF16") throw new Error(`weights are ${dtype}: the page reads BF16 and F32`);
    const halves = new Uint16Array(bytes), wide = new Uint32Array(halves.length);
    for (let i = 0; i < halves.length; i++) wide[i] = halves[i] << 16;
    return { shape, data: new Float32Array(wide.buffer) };
  };
  return Object.fromEntries(Object.entries(entries).map(([name, entry]) => [name, read(entry)]));
}

/* erf by a series of positive terms: nothing cancels. */
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= 2 * x * x / (2 * n + 1);
  return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
}

/* The kernel in plain JavaScript, for pages that may not run WebAssembly; same arguments, but offsets in floats. */
function plainMatmul(heap) {
  return (x, xRow, w, y, yRow, rows, inner, panels) => {
    const sums = new Float32Array(8);
    for (let panel = 0; panel < panels; panel++)
      for (let row = 0; row < rows; row++) {
        sums.fill(0);
        for (let k = 0, at = w + panel * inner * 8; k < inner; k++, at += 8) {
          const value = heap[x + row * xRow + k];
          for (let j = 0; j < 8; j++) sums[j] += value * heap[at + j];
        }
        heap.set(sums, y + row * yRow + panel * 8);
      }
  };
}

class LiveModel {
  constructor(spec, buffer, kernel) {
    const tensors = readSafetensors(buffer);
    const { width, heads, kv_heads, head_dim, inner, vocab, length } = spec;
    const rows = padded(length);
    const parts = [
      ...spec.blocks.flatMap(({ prefix }) => Object.values(MATRICES).map(name => prefix + name)), spec.head, // matrices
    ];
    const sizes = { // of what changes from pass to pass
      x: rows * width, read: rows * width, branch: rows * width, q: rows * heads * head_dim, k: rows * kv_heads * head_dim,
      v: rows * kv_heads * head_dim, mixed: rows * heads * head_dim, scores: rows * rows, panel: rows * head_dim,
      gate: rows * inner, up: rows * inner, logits: rows * padded(vocab), states: (spec.blocks.length + 1) * rows * width,
    };
    const matrices = parts.reduce((sum, name) => sum + padded(tensors[name].shape[0]) * tensors[name].shape[1], 0);
    const bytes = 4 * (matrices + Object.values(sizes).reduce((a, b) => a + b));
    const memory = kernel && new WebAssembly.Memory({ initial: Math.ceil(bytes / 65536) });
    this.heap = new Float32Array(kernel ? memory.buffer : bytes / 4);
    this.matmul = plainMatmul(this.heap);
    if (kernel) {
      const run = new WebAssembly.Instance(new WebAssembly.Module(kernel), { page: { memory } }).exports.matmul;
      this.matmul = (x, xRow, w, y, yRow, ...rest) => run(4 * x, 4 * xRow, 4 * w, 4 * y, 4 * yRow, ...rest);
    }
    let free = 0;
    const reserve = count => (free += count) - count;
    this.at = Object.fromEntries(Object.entries(sizes).map(([name, count]) => [name, reserve(count)]));
    this.packed = {};
    for (const name of parts) {
      const { shape: [outputs, inputs], data } = tensors[name];
      const start = this.packed[name] ??= reserve(padded(outputs) * inputs);
      this.pack(start, outputs, inputs, data, 0, inputs, 1);
    }
    this.vectors = Object.fromEntries(Object.entries(tensors).filter(([name, { shape }]) => shape.length < 2 || name === spec.embed)
      .map(([name, { data }]) => [name, data]));
    this.angles = Array.from({ length: length * head_dim / 2 }, (_, place) => {
      const t = Math.floor(2 * place / head_dim), i = place % (head_dim / 2);
      const angle = Math.fround(t * Math.fround(spec.theta ** (-2 * i / head_dim)));
      return { cos: Math.cos(angle), sin: Math.sin(angle) };
    });
    this.spec = spec;
    this.done = []; // the settings under which each block was last computed
    this.layers = [];
  }

  /* Lay a matrix out as the kernel reads it: panels of 8 outputs, see matmul.wat. */
  pack(start, outputs, inputs, data, from, outputStride, inputStride) {
    for (let n = 0; n < outputs; n++)
      for (let k = 0, to = start + (n >> 3) * inputs * 8 + (n & 7); k < inputs; k++, to += 8)
        this.heap[to] = data[from + n * outputStride + k * inputStride];
  }

  linear(x, name, y, inner, outer) {
    const columns = padded(outer);
    this.matmul(x, inner, this.packed[name], y, columns, this.rows, inner, columns / 8);
  }

  /* y = scale gamma f(slope (x - mean) / sqrt(ms + eps) + shift) + bias, row by row; a norm lacks some of these.
     `carried`: mean squares to divide by in place of x's own. Returns those used, the share of inputs of a bounded f beyond
     lambda (without a divisor: where |tanh| > 0.95), and the Chebyshev bound on it. */
  norm(norm, change, x, y, carried = null) {
    const { heap, vectors, count, spec: { width } } = this, squares = new Float64Array(count);
    const slope = (norm.slope ? vectors[norm.slope][0] * change.lam : 1) / (norm.kappa ? norm.kappa * change.kappa : 1);
    const limit = norm.kappa ? Math.abs(vectors[norm.slope][0] * change.lam) : Math.atanh(0.95);
    const shift = norm.shift ? vectors[norm.shift][0] : 0, bias = norm.bias && vectors[norm.bias];
    const gamma = vectors[norm.weight].map(weight => (weight + norm.centre) * change.gain * norm.scale);
    const [tanh, bounded] = [norm.f === "tanh", norm.f !== "none"];
    let beyond = 0, bound = 0;
    for (let row = 0, at = 0; row < count; row++, at += width) {
      let mean = 0, square = 0, factor = slope;
      if (norm.divide === "std") for (let i = 0; i < width; i++) mean += heap[x + at + i] / width;
      if (norm.divide) {
        for (let i = 0; i < width; i++) square += (heap[x + at + i] - mean) ** 2 / width;
        squares[row] = carried ? carried[row] : square;
        factor /= Math.sqrt(squares[row] + norm.eps);
        if (norm.kappa) bound += square / squares[row] / (norm.kappa * change.kappa) ** 2 / count;
      }
      for (let i = 0; i < width; i++) {
        const z = (heap[x + at + i] - mean) * factor + shift;
        if (z > limit || z < -limit) beyond++;
        heap[y + at + i] = gamma[i] * (tanh ? Math.tanh(z) : bounded ? erf(z) : z) + (bias ? bias[i] : 0);
      }
    }
    return { squares, share: norm.slope && norm.f !== "erf" ? beyond / (count * width) : null, bound: norm.kappa ? bound : null };
  }

  /* Rotary positions: halves of each head turn by position * theta^(-2i/d), in 32 bits as PyTorch computes them. */
  rotate(q, heads) {
    const { heap, angles, spec: { head_dim } } = this, half = head_dim / 2;
    for (let t = 0; t < this.count; t++)
      for (let i = 0; i < half; i++) {
        const { cos, sin } = angles[t * half + i];
        for (let head = 0; head < heads; head++) {
          const a = q + (t * heads + head) * head_dim + i, b = a + half, first = heap[a], second = heap[b];
          heap[a] = first * cos - second * sin;
          heap[b] = second * cos + first * sin;
        }
      }
  }

  attention(prefix, x, y) {
    const { heap, rows, at: { q, k, v, mixed, scores, panel } } = this, { width, heads, kv_heads, head_dim, scaling } = this.spec;
    const row = heads * head_dim, kvRow = kv_heads * head_dim;
    for (const [name, to, outer] of [["q", q, row], ["k", k, kvRow], ["v", v, kvRow]])
      this.linear(x, prefix + MATRICES[name], to, width, outer);
    this.rotate(q, heads);
    this.rotate(k, kv_heads);
    heap.fill(0, v + this.count * kvRow, v + rows * kvRow); // what weight 0 meets is finite
    for (let head = 0; head < heads; head++) {
      const shared = Math.floor(head * kv_heads / heads) * head_dim; // query heads share a key head
      this.pack(panel, rows, head_dim, heap, k + shared, kvRow, 1);
      this.matmul(q + head * head_dim, row, panel, scores, rows, rows, head_dim, rows / 8);
      for (let t = 0; t < this.count; t++) this.softmax(scores + t * rows, t + 1, rows, scaling);
      this.pack(panel, head_dim, rows, heap, v + shared, 1, kvRow);
      this.matmul(scores, rows, panel, mixed + head * head_dim, row, rows, rows, head_dim / 8);
    }
    this.linear(mixed, prefix + MATRICES.o, y, row, width);
  }

  /* Over the first `seen` of a row; what comes later has weight 0. */
  softmax(start, seen, size, scaling) {
    const row = this.heap.subarray(start, start + size);
    let most = -Infinity, sum = 0;
    for (let s = 0; s < seen; s++) most = Math.max(most, row[s]);
    for (let s = 0; s < seen; s++) sum += row[s] = Math.exp((row[s] - most) * scaling);
    for (let s = 0; s < seen; s++) row[s] /= sum;
    row.fill(0, seen);
  }

  mlp(prefix, x, y) {
    const { heap, at: { gate, up } } = this, { width, inner } = this.spec;
    this.linear(x, prefix + MATRICES.gate, gate, width, inner);
    this.linear(x, prefix + MATRICES.up, up, width, inner);
    for (let i = 0; i < this.rows * inner; i++) heap[gate + i] *= heap[up + i] / (1 + Math.exp(-heap[gate + i])); // silu
    this.linear(gate, prefix + MATRICES.down, y, inner, width);
  }

  /* One block, in place: x + out(f(in(x))), then sum(.), for f attention and MLP; a block has some of these norms. */
  block({ prefix, norms, carried, c, length }, change, x) {
    const { heap, at: { read, branch } } = this, size = this.count * this.spec.width;
    const before = heap.slice(x, x + size);
    const seen = {};
    let squares = null;
    for (const part of ["attn", "mlp"]) {
      const own = norms[part + "_in"], outer = norms[part + "_out"], total = norms[part + "_sum"];
      if (own) seen[part] = this.norm(own, change, x, read, part === "mlp" && !change.exact ? squares : null);
      else heap.copyWithin(read, x, x + size);
      this[part === "attn" ? "attention" : "mlp"](prefix, read, branch);
      if (outer) this.norm(outer, change, branch, branch);
      const share = part === "attn" ? change.attention : change.mlp;
      for (let i = 0; i < size; i++) heap[x + i] += share * heap[branch + i];
      if (total) seen[part] = this.norm(total, change, x, x);
      if (carried && part === "attn") { // the MLP's norm divides by attention's mean square and what attention adds to it
        const slope = this.vectors[own.slope][0] * change.lam / (own.kappa * change.kappa), growth = this.vectors[c][0] * slope ** 2;
        squares = seen.attn.squares.map((square, t) => square + growth * (carried === "causal" ? length / (t + 1) : 1));
      }
    }
    if (change.block !== 1) for (let i = 0; i < size; i++) heap[x + i] = before[i] + change.block * (heap[x + i] - before[i]);
    return seen;
  }

  /* Final norm and logits of the stream at x; cross-entropy of each next token, in nats. */
  losses(x) {
    const { heap, count, spec, at: { read, logits } } = this, row = padded(spec.vocab);
    this.norm(spec.final, AS_IS, x, read);
    this.linear(read, spec.head, logits, spec.width, spec.vocab);
    return Array.from(this.tokens.slice(1), (token, t) => {
      const scores = heap.subarray(logits + t * row, logits + t * row + spec.vocab);
      let most = -Infinity, sum = 0; // `for of` would put every number on the garbage collector's heap
      for (let i = 0; i < scores.length; i++) if (scores[i] > most) most = scores[i];
      for (let i = 0; i < scores.length; i++) sum += Math.exp(scores[i] - most);
      return most + Math.log(sum) - scores[token];
    });
  }

  /* The stream after each block is kept, so that a change costs the blocks from the first changed one on. */
  ask(tokens, change = {}, position = tokens.length - 1) {
    const { heap, spec, at: { x, states, logits } } = this, { width, blocks } = spec;
    if (tokens.length > spec.length) throw new Error(`${tokens.length} tokens: the model reads at most ${spec.length}`);
    if (!(position in tokens)) throw new Error(`no token ${position}: the text has ${tokens.length}`);
    if (String(tokens) !== String(this.tokens)) {
      this.done = [];
      this.tokens = [...tokens];
      this.count = tokens.length;
      this.rows = padded(this.count);
      const scale = spec.embedding_scale ? this.vectors[spec.embedding_scale][0] : 1;
      tokens.forEach((token, t) => {
        for (let i = 0; i < width; i++) heap[states + t * width + i] = scale * this.vectors[spec.embed][token * width + i];
      });
      this.layers = [{ size: this.size(states) }];
    }
    const settings = blocks.map((_, place) => changeAt(change, place + 1)), keys = settings.map(setting => JSON.stringify(setting));
    const fresh = keys.findIndex((key, place) => key !== this.done[place]), size = this.count * width;
    const first = fresh < 0 ? blocks.length : fresh, state = layer => states + layer * size;
    for (let layer = first; layer < blocks.length; layer++) {
      heap.copyWithin(state(layer + 1), state(layer), state(layer) + size);
      const seen = this.block(blocks[layer], settings[layer], state(layer + 1));
      this.layers[layer + 1] = { ...seen, size: this.size(state(layer + 1)) };
    }
    [this.done, this.settings] = [keys, settings];
    heap.copyWithin(x, state(blocks.length), state(blocks.length) + size);
    const losses = this.losses(x), start = logits + position * padded(spec.vocab);
    const seen = (part, what) => this.layers.slice(1).map(layer => layer[part]?.[what] ?? null);
    return {
      loss: losses.reduce((sum, loss) => sum + loss, 0) / losses.length, losses, sizes: this.layers.map(layer => layer.size),
      shares: { attn: seen("attn", "share"), mlp: seen("mlp", "share") }, bounds: { attn: seen("attn", "bound"), mlp: seen("mlp", "bound") },
      logits: heap.slice(start, start + spec.vocab), computed: blocks.length - first,
    };
  }

  /* Mean over tokens of the stream's L2 norm. */
  size(x) {
    const { heap, count, spec: { width } } = this;
    let total = 0;
    for (let t = 0; t < count; t++) {
      let square = 0;
      for (let i = 0; i < width; i++) square += heap[x + t * width + i] ** 2;
      total += Math.sqrt(square) / count;
    }
    return total;
  }

  without(layer) {
    const { heap, at: { x, states } } = this, size = this.count * this.spec.width;
    heap.copyWithin(x, states + (layer - 1) * size, states + layer * size);
    for (let next = layer; next < this.spec.blocks.length; next++) this.block(this.spec.blocks[next], this.settings[next], x);
    const losses = this.losses(x);
    return losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
  }
}

const MATRICES = {
  q: "self_attn.q_proj.weight", k: "self_attn.k_proj.weight", v: "self_attn.v_proj.weight", o: "self_attn.o_proj.weight",
  gate: "mlp.gate_proj.weight", up: "mlp.up_proj.weight", down: "mlp.down_proj.weight",
};

/* In a worker: messages { id, method, values } become { id, answer } or { id, error }. */
function serveModel(scope) {
  let model = null;
  const methods = {
    load: (spec, buffer, kernel) => { model = new LiveModel(spec, buffer, kernel && WebAssembly.validate(kernel) ? kernel : null); },
    ask: (...values) => model.ask(...values),
    without: layer => model.without(layer),
  };
  scope.onmessage = ({ data: { id, method, values } }) => {
    try {
      scope.postMessage({ id, answer: methods[method](...values) });
    } catch (error) {
      scope.postMessage({ id, error: error.message });
    }
  };
}
