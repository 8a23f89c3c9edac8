/* Byte-level BPE, as GPT-2 and `tokenizers` have it: text to token ids, and a token's text. */
function bytePairs({ vocab, merges, added, before, after }) {
  // Each byte has a visible letter: printable Latin-1 stands for itself, the others follow from 256 on.
  const letters = Array.from({ length: 256 }, (_, byte) => byte);
  const visible = byte => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let next = 256;
  for (let byte = 0; byte < 256; byte++) letters[byte] = String.fromCharCode(visible(byte) ? byte : next++);
  const bytes = Object.fromEntries(letters.map((letter, byte) => [letter, byte]));
  const ranks = new Map(merges.map((pair, rank) => [pair.join(" "), rank]));
  const texts = Object.fromEntries(Object.entries({ ...vocab, ...added }).map(([text, id]) => [id, text]));
  const special = new Map(Object.entries(added));
  const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

  function encodeWord(word) {
    let parts = Array.from(new TextEncoder().encode(word), byte => letters[byte]);
    for (;;) { // join the pair that was learned first, everywhere, until none is left
      const rankAt = place => ranks.get(parts[place] + " " + parts[place + 1]) ?? Infinity;
      let best = Infinity;
      for (let place = 0; place + 1 < parts.length; place++) best = Math.min(best, rankAt(place));
      if (best === Infinity) return parts.map(part => vocab[part]);
      const joined = [];
      for (let place = 0; place < parts.length; place++)
        joined.push(place + 1 < parts.length && rankAt(place) === best ? parts[place] + parts[++place] : parts[place]);
      parts = joined;
    }
  }
  const escaped = [...special.keys()].map(text => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const pieces = text => (escaped.length ? text.split(new RegExp(`(${escaped.join("|")})`)) : [text]);
  return {
    encode: text => [...before, ...pieces(text).flatMap(piece => special.has(piece) ? special.get(piece) : (piece.match(WORDS) ?? []).flatMap(encodeWord)), ...after],
    decode: id => special.has(texts[id]) ? texts[id] : new TextDecoder().decode(Uint8Array.from(texts[id] ?? "", letter => bytes[letter])),
  };
}
