// The page's start.
import { options, render, type VNode } from "preact";
import { visibleLines } from "./format";
import { begin } from "./session";
import { Shell } from "./shell";
import "./style/base.css";
import "./style/controls.css";
import "./style/shell.css";
import "./style/tables.css";
import "./style/charts.css";
import "./style/rollout.css";
import "./style/tokens.css";
import "./style/views.css";
import "./style/phone.css";

// Whatever text comes to be shown, by whichever view: nothing in it is invisible or turns the direction of the rest.
// The properties of a node of text are the text.
const before = options.vnode;
options.vnode = (node: { props: any }) => {
  if (typeof node.props === "string") node.props = visibleLines(node.props);
  else if (typeof node.props.title === "string") node.props.title = visibleLines(node.props.title);
  before?.(node as VNode);
};

const page = document.getElementById("page");
if (page) render(<Shell />, page);
void begin();
