// The records: a header and per-token columns, unpacked from the page (telemetry/inspect/page.py writes them).

const ARRAYS = { float32: Float32Array, int32: Int32Array, int8: Int8Array };

async function readRecords() {
  const text = document.getElementById("data").textContent;
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const headerLength = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headerLength)));
  const columns = {};
  for (const [name, { type, offset, length }] of Object.entries(header.columns))
    columns[name] = new ARRAYS[type](buffer, 4 + headerLength + offset, length);
  return new Records(header, columns);
}

class Records {
  constructor(header, columns) {
    Object.assign(this, header); // runs, trajectories (columns), words, fates, kinds
    this.columns = columns;
    this.count = this.trajectories.step.length;
    this.texts = new Array(this.count);
  }

  /** Tokens of trajectory `index` as [first, end) of the columns. */
  range(index) {
    const start = this.trajectories.start[index];
    return [start, start + this.trajectories.length[index]];
  }

  word(token) {
    return this.words[this.columns.word[token]] || `#${this.columns.token_id[token]}`;
  }

  kind(token) {
    return this.kinds[this.columns.kind[token]];
  }

  /** Name of the token's fate; "" where it has none. */
  fate(token) {
    return this.fates[this.columns.fate[token]] ?? "";
  }

  /** What the text filter searches: id, prompt and the whole conversation, in lower case. */
  text(index) {
    if (this.texts[index] === undefined) {
      const [first, end] = this.range(index),
        parts = [];
      for (let token = first; token < end; token++) parts.push(this.word(token));
      const { trajectory, prompt } = this.trajectories;
      this.texts[index] = `${trajectory[index]} ${prompt[index]} ${parts.join("")}`.toLowerCase();
    }
    return this.texts[index];
  }
}

/** A number to about four digits; "–" where there is none. */
function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text =
    Number.isInteger(value) && size < 1e12
      ? value.toLocaleString("en")
      : size < 1e-4 || size >= 1e5
        ? value.toExponential(2)
        : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${shown(Number((100 * share).toPrecision(3)))} %`;
}

/** Make an element: el("span", {class: "x", onclick: f}, "text", child). */
function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
