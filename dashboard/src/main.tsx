// The page's start.
import { render } from "preact";
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

const page = document.getElementById("page");
if (page) render(<Shell />, page);
void begin();
