// The smallest contrast of texts and of what is drawn, as WCAG 2.2 computes it, each with where it is; what has no name for
// who does not see it, what scrolls and keys do not reach, or has an order of its own, and texts of charts that are cut off.
(() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (text) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = text;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
    return [r / 255, g / 255, b / 255, a / 255];
  };
  const over = (top, below) => below.map((part, at) => top[at] * top[3] + part * (1 - top[3]));
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.unshift(parse(getComputedStyle(at).backgroundColor));
    return layers.reduce((below, top) => over(top, below), parse(getComputedStyle(document.body).backgroundColor).slice(0, 3));
  };
  const ratio = (ink, node) => {
    const below = behind(node), [dark, light] = [over(parse(ink), below), below].map(luminance).sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const least = {};
  const note = (kind, node, value, what) => {
    if (!least[kind] || value < least[kind][0]) least[kind] = [value, `${node.tagName} ${node.getAttribute("class") || ""}`, what];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement, text = texts.currentNode.data.trim(), style = getComputedStyle(node);
    if (!text || !node.getClientRects().length || node.matches("script, style, svg title, option")) continue;
    const isDrawn = node instanceof SVGElement;  // A cross at a NaN is a mark of its curve.
    note(node.matches(".bad") ? "drawn" : "text", node, ratio(isDrawn ? style.fill : style.color, node), text);
  }
  for (const field of document.querySelectorAll("input[placeholder]")) {
    note("text", field, ratio(getComputedStyle(field, "::placeholder").color, field), field.placeholder);
  }
  const drawn = "path.curve:not(.faint), path.run, .plot circle, .timeline path, .swatch, .medium rect[data-tip]";
  for (const node of document.querySelectorAll(drawn)) {
    const style = getComputedStyle(node), tints = node.matches(".swatch") ? [style.backgroundColor] : [style.stroke, style.fill];
    const tint = tints.find((text) => text !== "none");
    note("drawn", node, ratio(tint, node.closest(".plot, .medium, td")), tint);
  }
  const isShown = (node) => node.getClientRects().length > 0;
  const all = (selector, test) => [...document.querySelectorAll(selector)].filter(test)
    .map((node) => `${node.tagName} ${node.getAttribute("class")} ${node.textContent.slice(0, 40)}`);
  const isUnnamed = (node) => isShown(node) && node.getAttribute("aria-hidden") !== "true"
    && !(node.labels && node.labels.length)
    && ![node.getAttribute("aria-label"), node.alt, node.title, node.textContent.trim()].some(Boolean);
  const isMisplaced = (node) => {
    const { overflowX, overflowY } = getComputedStyle(node);
    const scrolls = (overflowX === "auto" && node.scrollWidth > node.clientWidth + 1)
      || (overflowY === "auto" && node.scrollHeight > node.clientHeight + 1);
    return node.tabIndex > 0 || (scrolls && node.tabIndex < 0);
  };
  const isCut = (node) => {
    const [box, around] = [node, node.ownerSVGElement].map((other) => other.getBoundingClientRect());
    const isBeside = box.left < around.left - 1 || box.right > around.right + 1;
    return box.width && (isBeside || box.top < around.top - 1 || box.bottom > around.bottom + 1);
  };
  return {
    ...least, unnamed: all("[tabindex='0'], input, select, button, a, svg, img", isUnnamed),
    misplaced: all("body *", isMisplaced), cut: all("svg text", isCut),
  };
})()
