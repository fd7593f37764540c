// The keyboard: one listener for the page, and views that say what keys mean while they are shown.
import { useEffect, useRef } from "preact/hooks";

type Actions = Record<string, () => void>;

const layers: { current: Actions }[] = [];
let before = ""; // a key that waits for a second one, as `g` does for `g r`

const PREFIXES = ["g"];

addEventListener("keydown", (event) => {
  const at = event.target as HTMLElement;
  const typing = at.matches("input:not([type=checkbox], [type=range]), textarea, select");
  if (event.key === "Escape" && typing) at.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  const chord = before ? `${before} ${event.key}` : event.key;
  before = !before && PREFIXES.includes(event.key) ? event.key : "";
  const layer = layers.findLast((one) => one.current[chord]);
  if (layer) {
    event.preventDefault();
    layer.current[chord]?.();
  }
});

/** While the component is shown, these keys do that. Of two that know a key, the one shown last has it. */
export function useKeys(actions: Actions): void {
  const own = useRef(actions);
  own.current = actions;
  useEffect(() => {
    layers.push(own);
    return () => void layers.splice(layers.indexOf(own), 1);
  }, []);
}
