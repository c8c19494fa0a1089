// Rows of completions are made when they are looked at, and of text only: no string of the data becomes HTML.
const data = JSON.parse(document.getElementById('data').textContent);
const reading = document.getElementById('reading');
const rest = reading.textContent;
const list = document.getElementById('list');
const search = document.getElementById('search');
const STEPS = 8, ON_PAGE = 10;
let current = null, found = [], first = 0;

function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function digits(value, count) {
  if (value === null) return 'none';
  return value && Math.abs(value) < 1e-4 ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
}

// Shades: STEPS above the neutral value and STEPS below it. Weights range on either side of 1; other numbers are as
// strong below 0 as above, so rounding stays pale.
function scaleOf(kind, values) {
  const known = values.filter(value => value !== null), neutral = kind === 'weights' ? 1 : 0;
  const bounds = kind === 'weights' ? data.bounds : known.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [0, 0]);
  const low = Math.min(bounds[0], neutral), high = Math.max(bounds[1], neutral);
  const even = Math.max(-low, high);
  return { neutral, low, high, extent: kind === 'weights' ? [neutral - low, high - neutral] : [even, even] };
}
function shade(value, scale) {
  if (value === null) return 'none';
  const up = value > scale.neutral, extent = scale.extent[up ? 1 : 0];
  const step = extent > 0 ? Math.round(STEPS * Math.abs(value - scale.neutral) / extent) : 0;
  return step ? (up ? 'w' : 'c') + step : '';
}
function legend(scale) {
  const ends = [scale.low, scale.high].map(value => value === scale.neutral ? '' : digits(value, 3) + '\u00a0');
  const [down, up] = [scale.low, scale.high].map(value => Number(shade(value, scale).slice(1)));
  const box = name => make('i', { class: name }), made = make('span', { class: 'scale' }, ends[0]);
  for (let step = down; step > 0; step -= 2) made.append(box('c' + step));
  made.append(box(), String(scale.neutral), box());
  for (let step = 2 - up % 2; step <= up; step += 2) made.append(box('w' + step));
  made.append(' ' + ends[1]);
  return made;
}
function shown(text) {
  const sign = mark => make('b', { class: 'sign' }, mark);
  if (!text) return [sign('\u2205')];
  return text.split(/(\t|\n)/).flatMap(
    part => part === '\t' ? [sign('\u2192'), part] : part === '\n' ? [sign('\u21b5'), part] : part ? [part] : []);
}

function columnsOf(sample) {
  const columns = sample.credit.slice();
  if (sample.spans.length) {
    const importances = sample.tokens.map(() => null);
    for (const [start, end, drop] of sample.spans)
      for (let place = start; place < end; place++)
        importances[place] = importances[place] === null ? -drop : Math.max(importances[place], -drop);
    columns.push(['importance of the span', sample.unit, sample.unit, importances]);
  }
  return columns.length ? columns : [['tokens', '', 'without credit', sample.tokens.map(() => null)]];
}
function figure(sample, [name, kind, notes, values]) {
  const scale = scaleOf(kind, values), [from, to] = sample.answer || [0, 0];
  const tokens = sample.tokens.map((text, place) => {
    const classes = [shade(values[place], scale), from <= place && place < to ? 'answer' : ''];
    return make('span', { title: digits(values[place], 4), class: classes.filter(Boolean).join(' ') }, ...shown(text));
  });
  const caption = make('figcaption', {}, make('strong', {}, make('bdi', {}, name)), make('small', {}, notes), legend(scale));
  return make('figure', {}, caption,
    make('div', { class: 'tokens', tabindex: '0', role: 'group', 'aria-label': name }, ...tokens));
}
function spanText(sample, [start, end, , text]) { return text ?? sample.tokens.slice(start, end).join(''); }
function spanTable(sample) {
  const table = make('table', {}, make('tr', {}, ...['tokens', `drop (${sample.unit})`, 'text'].map(name => make('th', {}, name))));
  for (const span of sample.spans) {
    const [start, end, drop] = span;
    table.append(make('tr', {}, make('td', { class: 'number' }, `${start}\u2013${end - 1}`),
      make('td', { class: 'number' }, (drop < 0 ? '' : '+') + drop.toFixed(3)), make('td', {}, spanText(sample, span))));
  }
  const details = make('details', {}, make('summary', {}, `${sample.spans.length} masked spans`));
  details.addEventListener('toggle', () => details.append(make('div', { class: 'wide' }, table)), { once: true });
  return details;
}
function article(number) {
  const sample = data.completions[number], made = make('article', { 'aria-labelledby': 'c' + number },
    make('h3', { id: 'c' + number }, `Completion ${number + 1}`), make('p', { class: 'soft' }, sample.facts),
    make('div', { class: 'row' }, ...columnsOf(sample).map(column => figure(sample, column))));
  made.dataset.number = number;
  if (sample.spans.length) made.append(spanTable(sample));
  return made;
}

// The search: which completions are listed, and the ten of them that are on the page.
function turnTo(start) {
  first = start;
  rested();
  list.replaceChildren(...found.slice(first, first + ON_PAGE).map(article));
  const last = Math.min(first + ON_PAGE, found.length), of = `of ${found.length.toLocaleString('en')}`;
  document.getElementById('place').textContent =
    found.length ? `${first + 1} to ${last} ${of}` : data.completions.length ? 'none matches' : 'none was logged';
  document.getElementById('back').disabled = first === 0;
  document.getElementById('next').disabled = last === found.length;
}
function look() {
  const wanted = Object.fromEntries(new FormData(search));
  const inside = (value, name) => {
    const [from, to] = [wanted[name + '-from'], wanted[name + '-to']];
    return !from && !to || value !== null && (!from || value >= Number(from)) && (!to || value <= Number(to));
  };
  found = [...data.completions.keys()].filter(number => {
    const sample = data.completions[number];
    return inside(sample.step, 'step') && inside(sample.reward, 'reward') && (!wanted.run || sample.run === wanted.run);
  });
  turnTo(0);
}
search.addEventListener('input', look);
search.addEventListener('submit', event => event.preventDefault());
for (const [id, by] of [['back', -ON_PAGE], ['next', ON_PAGE]])
  document.getElementById(id).addEventListener('click', () => {
    turnTo(first + by);
    search.scrollIntoView({ block: 'start' });
  });

// What the token under the mouse or the arrow keys holds, for all estimators at once.
function rested() {
  for (const old of document.querySelectorAll('.here')) old.classList.remove('here');
  reading.textContent = rest;
  current = null;
}
function show(block, index) {
  const here = block.closest('article'), sample = data.completions[here.dataset.number], parts = [];
  for (const old of document.querySelectorAll('.here')) old.classList.remove('here');
  for (const other of here.querySelectorAll('.tokens')) {
    other.children[index].classList.add('here');
    parts.push(other.getAttribute('aria-label') + ' ' + other.children[index].title);
  }
  for (const span of sample.spans)
    if (span[0] <= index && index < span[1])
      parts.push(`drop of the span \u201c\u2068${spanText(sample, span)}\u2069\u201d ${digits(span[2], 4)} (${sample.unit})`);
  const text = '\u2068' + block.children[index].textContent + '\u2069';
  reading.textContent = 'Token ' + index + ' \u201c' + text + '\u201d: ' + parts.join(' \u00b7 ');
  current = [block, index];
}
const blockOf = event => event.target.closest('.tokens');
list.addEventListener('mouseover', event => {
  const token = event.target.closest('.tokens > span');
  if (token) show(token.parentElement, [...token.parentElement.children].indexOf(token));
});
list.addEventListener('focusin', event => {
  const block = blockOf(event);
  if (!block || !block.children.length) return;
  show(block, current && current[0].closest('article') === block.closest('article') ? current[1] : 0);
});
list.addEventListener('keydown', event => {
  const block = blockOf(event), by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
  if (by === undefined || !block || !block.children.length) return;
  event.preventDefault();
  const from = current && current[0] === block ? current[1] : 0;
  show(block, Math.max(0, Math.min(block.children.length - 1, from + by)));
  block.children[current[1]].scrollIntoView({ block: 'nearest' });
});
addEventListener('keydown', event => { if (event.key === 'Escape') rested(); });
look();
