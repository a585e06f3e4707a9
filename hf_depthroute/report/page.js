"use strict";
// The token view, and the switch of everything else between budgets. All text enters as text nodes, never as HTML.
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (tag, kind, text) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const data = JSON.parse(byId("token-data").textContent);
  const box = byId("text");
  const radios = [...document.querySelectorAll("input[name=budget]")];
  const state = { text: 0, budget: 0, layer: null, shade: "depth", now: -1 };
  let tokens = []; // of the run shown: per piece its text, layers, shares and losses
  let spans = [];

  // Control characters and those that reorder text are shown by name, so that they change nothing on the page.
  const visible = (text) =>
    text
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
      .replace(/[\u007f-\u009f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => `‹U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
  const oneLine = (text) => visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥");

  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const unpack = (run) => {
    const layers = run.layers.map((layer) => ({ ...layer, values: floats(layer.scores), limit: layer.threshold === null ? null : Number(layer.threshold) }));
    for (const layer of layers) {
      const known = layer.values.filter(Number.isFinite);
      const from = layer.limit !== null && Number.isFinite(layer.limit) ? layer.limit : 0;
      layer.reach = known.reduce((most, value) => Math.max(most, Math.abs(value - from)), 1e-6);
    }
    let start = 0;
    return run.pieces.map((text, index) => {
      const count = run.counts[index];
      const positions = Array.from({ length: count }, (_, k) => start + k);
      start += count;
      const decided = layers.map((layer) => {
        const range = [positions[0] * layer.decisions, (positions[count - 1] + 1) * layer.decisions];
        const mask = [...layer.mask.slice(...range)].map((c) => c === "1");
        return { layer, mask, scores: [...layer.values.slice(...range)], share: mask.filter(Boolean).length / mask.length };
      });
      const sum = (values) => (values.some((v) => v === null) ? null : values.reduce((a, b) => a + b, 0));
      return {
        text, positions, decided, full: decided.reduce((total, d) => total + d.share, 0),
        loss: sum(positions.map((p) => run.loss[p])), dense: sum(positions.map((p) => run.dense_loss[p])),
        generated: run.prompt !== null && positions[0] >= run.prompt,
      };
    });
  };

  const round = (value) => String(Math.round(value * 100) / 100);
  const fullWords = (token) => `${round(token.full)} of ${token.decided.length} layers full`;
  const decision = (d) => {
    if (d.mask.length === 1) return d.mask[0] ? "full" : "skipped";
    return `${d.mask.filter(Boolean).length} of ${d.mask.length} full`;
  };
  const number = (value, beside) => {
    if (Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
    let digits = 3;
    // A score next to the threshold gets the digits that tell them apart.
    while (digits < 8 && Number.isFinite(beside) && value !== beside && value.toFixed(digits) === beside.toFixed(digits)) digits++;
    return value.toFixed(digits).replace("-", "−");
  };
  const mostLoss = () => Math.max(1e-6, ...tokens.map((t) => t.loss ?? 0));
  const share = (token, most) => {
    if (state.shade === "loss") return (token.loss ?? 0) / most;
    return state.layer === null ? token.full / token.decided.length : token.decided[state.layer].share;
  };
  const label = (token) => {
    const said = state.layer === null ? fullWords(token) : `layer ${data.layers[state.layer]} ${decision(token.decided[state.layer])}`;
    const loss = token.loss === null ? "" : `, loss ${token.loss.toFixed(2)}`;
    return `${oneLine(token.text).trim() || "space"}: ${said}${loss}${token.generated ? ", generated" : ""}`;
  };

  const shade = () => {
    const most = mostLoss();
    tokens.forEach((token, index) => {
      spans[index].style.setProperty("--share", share(token, most).toFixed(3));
      spans[index].setAttribute("aria-label", label(token));
    });
    const legend = byId("legend");
    legend.replaceChildren(make("span", "", state.shade === "loss" ? "Loss in nats:" : state.layer === null ? "Layers run full:" : `Layer ${data.layers[state.layer]}:`));
    const count = data.layers.length;
    let steps;
    if (state.shade === "loss") steps = [0, 0.5, 1].map((s) => [s, (s * most).toFixed(1)]);
    else if (state.layer !== null) steps = [[0, "skipped"], [1, "full"]];
    else steps = [...new Set(count <= 6 ? [...Array(count + 1).keys()] : [0, Math.round(count / 4), Math.round(count / 2), Math.round((3 * count) / 4), count])].map((n) => [n / count, `${n} of ${count}`]);
    for (const [value, text] of steps) {
      const sample = make("span", "t", `\u00a0${text}\u00a0`);
      sample.style.setProperty("--share", value);
      legend.append(sample);
    }
    const total = tokens.reduce((n, t) => n + t.positions.length, 0);
    const mean = tokens.reduce((sum, t) => sum + (state.layer === null ? t.full / count : t.decided[state.layer].share) * t.positions.length, 0) / (total || 1);
    const known = tokens.filter((t) => t.loss !== null);
    const average = (key) => known.reduce((sum, t) => sum + t[key], 0) / known.reduce((n, t) => n + t.positions.length, 0);
    const run = data.texts[state.text].runs[state.budget];
    const parts = [`${run.budget === null ? "" : `Budget ${run.budget}, `}${state.layer === null ? "all routed layers" : `layer ${data.layers[state.layer]}`}: ${(100 * mean).toFixed(1)}% of ${total} tokens run full`];
    if (known.length) parts.push(`loss ${average("loss").toFixed(3)}${known.every((t) => t.dense !== null) ? ` (dense ${average("dense").toFixed(3)})` : ""}`);
    byId("summary").textContent = `${parts.join(", ")}.`;
  };

  const draw = () => {
    tokens = unpack(data.texts[state.text].runs[state.budget]);
    spans = [];
    const part = document.createDocumentFragment();
    tokens.forEach((token, index) => {
      if (token.generated && index && !tokens[index - 1].generated) {
        const from = make("span", "from", "generated");
        from.setAttribute("aria-hidden", "true");
        part.append(from);
      }
      const span = make("span", token.generated ? "t made" : "t");
      span.id = `token-${index}`;
      span.dataset.index = index;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      const shown = visible(token.text).replace(/\t/g, "⇥");
      for (const piece of shown.split(/(\n)/)) {
        if (piece === "\n") span.append(make("span", "sign", "↵"), "\n");
        else if (piece) span.append(piece);
      }
      if (!shown) span.append(make("span", "sign", "∅"));
      spans.push(span);
      part.append(span);
    });
    box.replaceChildren(part);
    state.now = Math.min(state.now, tokens.length - 1);
    shade();
    show(state.now);
    fillTable();
  };

  // The chosen token, or for the time of pointing at another one that one.
  const show = (index) => {
    const token = tokens[index];
    const body = byId("detail-table").tBodies[0];
    body.replaceChildren();
    byId("detail-table").hidden = !token;
    if (!token) {
      byId("detail-title").textContent = "No token chosen";
      byId("detail-facts").textContent = "Point at a token, or tap it.";
      return;
    }
    byId("detail-title").textContent = `“${oneLine(token.text)}”`;
    const facts = [`token ${token.positions.map((p) => p + 1).join(", ")}`, fullWords(token)];
    if (token.positions.length > 1) facts.push("tokens that make one character together");
    if (token.loss !== null) facts.push(`loss ${token.loss.toFixed(3)}${token.dense === null ? "" : ` (dense ${token.dense.toFixed(3)})`}`);
    if (data.texts[state.text].runs[state.budget].prompt !== null) facts.push(token.generated ? "generated" : "prompt");
    byId("detail-facts").textContent = facts.join(" · ");
    token.decided.forEach((d, place) => {
      const row = make("tr", place === state.layer ? "chosen" : "");
      const head = make("th", "", String(d.layer.layer));
      head.scope = "row";
      const limit = d.layer.limit;
      const some = d.share > 0;
      const said = make("td", some ? "left yes" : "left", `${d.share === 1 ? "■" : some ? "◧" : "□"} ${decision(d)}`);
      row.append(head, make("td", "", d.scores.map((s) => number(s, limit)).join(", ")), make("td", "", limit === null ? "–" : number(limit)), said);
      const cell = make("td", "left");
      if (limit !== null && Number.isFinite(limit) && d.scores.every(Number.isFinite)) {
        const gauge = make("span", "gauge");
        gauge.setAttribute("aria-hidden", "true");
        gauge.append(make("i"));
        d.scores.forEach((s, k) => {
          const dot = make("b", d.mask[k] ? "yes" : "");
          dot.style.setProperty("left", `${50 + (46 * (s - limit)) / d.layer.reach}%`);
          gauge.append(dot);
        });
        cell.append(gauge);
      }
      row.append(cell);
      body.append(row);
    });
  };

  const choose = (index) => {
    if (!tokens.length) return;
    spans[state.now]?.classList.remove("now");
    spans[state.now]?.setAttribute("aria-selected", "false");
    state.now = Math.max(0, Math.min(tokens.length - 1, index));
    const span = spans[state.now];
    span.classList.add("now");
    span.setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", span.id);
    const [view, place] = [box.getBoundingClientRect(), span.getBoundingClientRect()];
    if (place.top < view.top) box.scrollTop -= view.top - place.top + 24;
    else if (place.bottom > view.bottom) box.scrollTop += place.bottom - view.bottom + 24;
    show(state.now);
    // On a narrow page the panel lies over the end of the text, and the budgets over its beginning.
    const [panel, bar] = [document.querySelector(".detail"), document.querySelector(".bar")].map((e) => e?.getBoundingClientRect());
    const spot = span.getBoundingClientRect();
    if (spot.right > panel.left && spot.bottom > panel.top) window.scrollBy(0, spot.bottom - panel.top + 16);
    else if (bar && spot.top < bar.bottom) window.scrollBy(0, spot.top - bar.bottom - 16);
  };

  // The nearest token of the next line in a direction; lines are where the browser broke them.
  const otherLine = (step) => {
    const place = (index) => spans[index].getClientRects()[0]; // where it begins, if it goes over several lines
    const here = place(state.now);
    const apart = here.height * 0.6;
    let best = state.now;
    let line = null;
    for (let i = state.now + step; spans[i]; i += step) {
      const there = place(i);
      if (line === null && step * (there.top - here.top) > apart) line = there.top;
      if (line === null) continue;
      if (Math.abs(there.top - line) > apart) break;
      const distance = (rect) => Math.abs(rect.left + rect.width / 2 - here.left - here.width / 2);
      if (best === state.now || distance(there) < distance(place(best))) best = i;
    }
    return best;
  };

  const fillTable = () => {
    const details = byId("as-table");
    const place = details.querySelector("div");
    place.replaceChildren();
    if (!details.open) return;
    const table = make("table");
    const head = table.createTHead().insertRow();
    for (const name of ["token", "text", "layers full", "loss", ...data.layers.map((l) => `layer ${l}`)]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    const body = table.createTBody();
    for (const token of tokens) {
      const row = body.insertRow();
      const first = make("th", "", token.positions.map((p) => p + 1).join(", "));
      first.scope = "row";
      row.append(first, make("td", "piece", oneLine(token.text)), make("td", "", round(token.full)), make("td", "", token.loss === null ? "–" : token.loss.toFixed(3)));
      for (const d of token.decided) row.append(make("td", "", decision(d)));
    }
    place.append(table);
  };

  const switchBudget = (index) => {
    state.budget = Number(index);
    for (const part of document.querySelectorAll("[data-budget]")) part.hidden = Number(part.dataset.budget) !== state.budget;
    draw();
  };
  const switchLayer = (value) => {
    state.layer = value === "all" ? null : Number(value);
    for (const part of document.querySelectorAll("[data-layer]")) part.hidden = state.layer !== null && Number(part.dataset.layer) !== state.layer;
    shade();
    show(state.now);
  };

  for (const radio of radios) radio.addEventListener("change", () => switchBudget(radio.value));
  byId("choose-budget")?.addEventListener("change", (event) => switchBudget(event.target.value));
  byId("choose-text")?.addEventListener("change", (event) => {
    state.text = Number(event.target.value);
    state.now = -1;
    draw();
  });
  byId("choose-layer").addEventListener("change", (event) => switchLayer(event.target.value));
  byId("choose-shade").addEventListener("change", (event) => {
    state.shade = event.target.value;
    shade();
  });
  byId("as-table").addEventListener("toggle", fillTable);
  const at = (event) => event.target.closest?.("[data-index]");
  box.addEventListener("pointerover", (event) => at(event) && event.pointerType !== "touch" && show(Number(at(event).dataset.index)));
  box.addEventListener("pointerleave", () => show(state.now));
  box.addEventListener("click", (event) => at(event) && choose(Number(at(event).dataset.index)));
  box.addEventListener("focus", () => state.now < 0 && box.matches(":focus-visible") && choose(0));
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const now = Math.max(state.now, 0);
    const moves = { ArrowRight: () => now + 1, ArrowLeft: () => now - 1, ArrowDown: () => otherLine(1), ArrowUp: () => otherLine(-1), Home: () => 0, End: () => tokens.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    if (state.now < 0) choose(0);
    else choose(moves[event.key]());
  });
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  if (!data.texts.some((text) => text.runs.some((run) => run.loss.some((loss) => loss !== null)))) byId("choose-shade").parentElement.hidden = true;
  for (const control of document.querySelectorAll("select")) control.selectedIndex = 0;
  const checked = radios.find((radio) => radio.defaultChecked);
  if (checked) checked.checked = true; // a reload keeps what was chosen before, and the page starts over
  switchBudget(checked ? checked.value : 0);
})();
