// Elements are made when they are looked at, and of text only: no string of the data becomes HTML.
const data = JSON.parse(document.getElementById('data').textContent);
const [list, search, place, next, reading] = ['list', 'search', 'place', 'next', 'reading'].map(id => document.getElementById(id));
const WIDE = matchMedia('(min-width: 45rem)').matches, ON_PAGE = 10;
let matching = [];
function make(tag, attributes, ...children) {
  const space = ['svg', 'path', 'text', 'circle'].includes(tag) ? '2000/svg' : '1999/xhtml';
  const made = document.createElementNS('http://www.w3.org/' + space, tag);
  for (const [name, value] of Object.entries(attributes)) if (value || value === 0) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const digits = (value, count) =>
  value === null ? 'none' : value && Math.abs(value) < 1e-4 ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
const extent = values => values.filter(x => x !== null).reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
// Signs for characters that do not print: controls, directions, joiners, halves of surrogates.
function printed(text) {
  const sign = character => `[U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}]`;
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu,
    character => ({ '\n': '\u21b5\n', '\t': '\u2192\t' })[character] ?? sign(character)) || '\u2205';
}

// Weights lie on either side of 1 and have one scale; other numbers are as strong below 0 as above, so rounding stays pale.
const weights = data.completions.flatMap(sample => Object.values(sample.credit)).filter(credit => credit.kind === 'weights');
const bounds = extent([1, ...weights.flatMap(credit => credit.values)]);
function scaleOf(kind, values) {
  const neutral = kind === 'weights' ? 1 : 0, [low, high] = neutral ? bounds : extent([0, ...values]);
  const shade = value => {
    const up = value > neutral, most = neutral ? (up ? high - 1 : 1 - low) : Math.max(-low, high);
    const alpha = most ? .62 * Math.abs(value - neutral) / most : 0;
    return value === null || !alpha ? 'transparent' : `rgb(var(--${up ? 'warm' : 'cool'}) / ${alpha.toFixed(3)})`;
  };
  return { low, high, shade, middle: 100 * (neutral - low) / (high - low || 1) };
}
function importancesOf(sample) {
  const drops = i => sample.spans.filter(({ start, end }) => start <= i && i < end).map(span => span.drop);
  return sample.tokens.map((_, i) => drops(i).length ? Math.max(...drops(i)) : null);
}
function figure(sample, [name, { kind, values }]) {
  const { low, high, shade, middle } = scaleOf(kind, values), [from, to] = sample.answer || [0, 0];
  const gradient = `background: linear-gradient(90deg, ${shade(low)}, transparent ${middle}%, ${shade(high)})`;
  const tokens = sample.tokens.map((text, i) =>
    make('span', { class: from <= i && i < to ? 'answer' : '', style: `background: ${shade(values[i])}` }, printed(text)));
  return make('figure', {},
    make('figcaption', {}, make('strong', {}, printed(name)), make('small', {}, kind),
      make('small', { class: 'scale' }, digits(low, 3), make('i', { style: gradient }), digits(high, 3))),
    make('div', { class: 'tokens', tabindex: '0', role: 'group', 'aria-label': printed(name) }, ...tokens));
}
function completion(sample, open) {
  const columns = Object.entries(sample.credit), known = value => value !== null;
  if (columns.length !== 1)
    columns.push(sample.spans.length ? ['importance of spans', { kind: sample.drops_unit, values: importancesOf(sample) }]
      : ['tokens', { kind: 'without credit', values: sample.tokens.map(() => null) }]);
  const facts = [
    known(sample.step) && `step ${sample.step}`, known(sample.problem) && `problem ${sample.problem}`,
    known(sample.reward) && `reward ${digits(sample.reward, 6)}`, known(sample.correct) && (sample.correct ? 'correct' : 'wrong'),
    known(sample.advantage) && sample.counted && `advantage ${digits(sample.advantage, 3)}`, sample.truncated && 'truncated',
    !sample.counted && 'not in the loss', sample.times > 1 && `\u00d7${sample.times}`].filter(Boolean).map(printed).join(' \u00b7 ');
  const why = sample.uncredited === null ? [] : [make('p', { class: 'soft' }, printed(`Not shaded: ${sample.uncredited}.`))];
  const made = make('details', { open }, make('summary', {}, facts || 'completion'), ...why, make('div', { class: 'sides' }));
  if (sample.question !== null)
    made.lastChild.append(make('aside', {}, sample.question, make('p', { class: 'soft' }, sample.reference ? `Right answer: ${sample.reference}` : '')));
  made.lastChild.append(make('div', { class: 'row' }, ...columns.map(column => figure(sample, column))));
  made.sample = sample;
  return made;
}

function showMore() {
  const shown = list.children.length;
  list.append(...matching.slice(shown, shown + ON_PAGE).map((sample, i) => completion(sample, WIDE || !(shown + i))));
  place.textContent = data.completions.length ? `${list.children.length} of ${matching.length.toLocaleString('en')}` : 'none was logged';
  next.hidden = list.children.length === matching.length;
}
function look() {
  const { step, wrong, order } = Object.fromEntries(new FormData(search));
  const rank = order === 'step' ? sample => sample.step : sample => extent(sample.spans.map(span => span.drop))[1];
  matching = data.completions.filter(sample => (!step || sample.step === Number(step)) && (!wrong || sample.correct === false))
    .map(sample => [rank(sample), sample]).sort(([a], [b]) => b - a || 0).map(([, sample]) => sample);
  list.replaceChildren();
  showMore();
}
search.addEventListener('input', look);
search.addEventListener('submit', event => event.preventDefault());
next.addEventListener('click', showMore);

// The numbers of the token under the mouse or the arrow keys, for all estimators at once.
function leave() {
  document.querySelectorAll('.here').forEach(token => token.classList.remove('here'));
  reading.textContent = '';
}
function show(block, index) {
  const details = block.closest('details'), sample = details.sample;
  leave();
  for (const other of details.querySelectorAll('.tokens')) other.children[index].classList.add('here');
  const parts = Object.entries(sample.credit).map(([name, { values }]) => `${name} ${digits(values[index], 4)}`);
  for (const { start, end, text, drop } of sample.spans)
    if (start <= index && index < end) parts.push(`importance of \u201c${text}\u201d ${digits(drop, 4)} (${sample.drops_unit})`);
  reading.textContent = printed(`Token ${index} \u201c${sample.tokens[index]}\u201d: ${parts.join(' \u00b7 ')}`);
}
addEventListener('mouseover', event => {
  const token = event.target.closest('.tokens > span');
  token ? show(token.parentElement, [...token.parentElement.children].indexOf(token)) : leave();
});
list.addEventListener('keydown', event => {
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
  const block = event.target.closest('.tokens'), tokens = [...block?.children ?? []];
  if (by === undefined || !tokens.length) return;
  event.preventDefault();
  const to = Math.max(0, Math.min(tokens.length - 1, tokens.findIndex(token => token.classList.contains('here')) + by));
  show(block, to);
  tokens[to].scrollIntoView({ block: 'nearest' });
});
addEventListener('keydown', event => { if (event.key === 'Escape') leave(); });

document.title = document.querySelector('h1').textContent = printed(data.title);
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) { // as the page was left when it loaded itself anew
  const field = search.elements.namedItem(name) || {};
  field[field.type === 'checkbox' ? 'checked' : 'value'] = value;
}
look();
