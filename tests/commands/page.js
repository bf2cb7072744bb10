// Runs the script of a page in Node with a small document, and prints the text of its elements.
//
//     node page.js < report.html
//
// The output is a JSON object: the text of each section, of each cell and caption, and of the axes.
const html = require("fs").readFileSync(0, "utf8");
const script = /<script nonce="[^"]*">([\s\S]*?)<\/script>/.exec(html)[1];
const data = /<script type="application\/json" id="data">([\s\S]*?)<\/script>/.exec(html)[1];

class Node {
  constructor(tag, text = "") { Object.assign(this, {tag, text, children: [], style: {}, dataset: {}, attributes: {}}) }
  append(...items) { this.children.push(...items.map(item => item instanceof Node ? Object.assign(item, {parentNode: this}) : new Node("#text", String(item)))) }
  replaceChildren(...items) { this.children = []; this.append(...items) }
  setAttribute(name, value) { this.attributes[name] = String(value); if (name === "value") this.value = String(value) }
  remove() { this.parentNode.children = this.parentNode.children.filter(child => child !== this) }
  get options() { return this.children.filter(child => child.tag === "option") }
  get childElementCount() { return this.children.length }
  get textContent() { return this.text + this.children.map(child => child.textContent).join("") }
  set textContent(text) { this.children = []; this.text = text }
  all(tag) { return [...(this.tag === tag ? [this] : []), ...this.children.flatMap(child => child.all(tag))] }
}
const main = new Node("main"), ids = {data: new Node("script", data), status: new Node("span"), legend: new Node("span")};
globalThis.Node = Node;
globalThis.document = {
  createElement: tag => new Node(tag), createElementNS: (_, tag) => new Node(tag),
  getElementById: id => ids[id], querySelector: () => main, body: new Node("body"),
};
new Function(script)();
setTimeout(() => {
  const texts = tag => main.all(tag).map(node => node.textContent);
  const figures = Object.fromEntries(main.all("figure").map(figure => [
    figure.all("figcaption")[0].textContent,
    figure.all("text").filter(text => text.attributes["text-anchor"] === "end").map(text => text.textContent),
  ]));
  const short = main.all("td").filter(cell => cell.attributes.class === "short").map(cell => cell.textContent);
  console.log(JSON.stringify({figures, short, heads: texts("th"), chips: texts("span"), bold: texts("b"), status: ids.status.textContent}));
}, 50);
