// Checks dashboards against JSON schemas made from the types of @grafana/schema.
//
//   node check.mjs DASHBOARD.json ...      every fault is named with its place; exit status 1
//
// The types say what Grafana fills in as required and leave out what other packages add, so required
// fields are not asked for and a dashboard's and a panel's own level may hold more.  Options and
// field settings of a panel may not: an unknown one is a misspelt one, which Grafana ignores.
import {readFileSync, existsSync} from 'node:fs';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';
import Ajv from 'ajv';
import {createGenerator} from 'ts-json-schema-generator';

const here = dirname(fileURLToPath(import.meta.url));
const types = join(here, 'node_modules/@grafana/schema/dist/types/raw');
const FOLDERS = {'state-timeline': 'statetimeline', 'status-history': 'statushistory'};
const WITHOUT_TYPES = new Set(['row']);

function schemaOf(path, type, strict) {
  const made = createGenerator({
    path, type, tsconfig: join(here, 'tsconfig.json'), skipTypeCheck: true, additionalProperties: !strict,
  }).createSchema(type);
  return relaxed(made, strict);
}

function relaxed(node, strict) {
  if (Array.isArray(node)) return node.map(it => relaxed(it, strict));
  if (node === null || typeof node !== 'object') return node;
  const out = {};
  for (const [key, value] of Object.entries(node)) {
    if (key === 'required' && Array.isArray(value)) continue;
    if (key === 'additionalProperties' && value === false && !strict) continue;
    out[key] = relaxed(value, strict);
  }
  return out;
}

const ajv = new Ajv({strict: false, allErrors: true, allowUnionTypes: true});
const known = new Map();
function validator(path, type, strict) {
  const key = `${path} ${type}`;
  if (!known.has(key)) {
    const has = existsSync(path) && new RegExp(`export interface ${type}\\b`).test(readFileSync(path, 'utf8'));
    known.set(key, has ? ajv.compile(schemaOf(path, type, strict)) : null);
  }
  return known.get(key);
}

// Options of Grafana 11 and 12 that 13 has moved elsewhere, and still reads.
const UNTIL_12 = {table: ['footer']};
function options(panel) {
  const given = {...panel.options};
  for (const name of UNTIL_12[panel.type] ?? []) delete given[name];
  return given;
}

let faults = 0;
function check(what, validate, value) {
  if (validate === null || value === undefined || validate(value)) return;
  for (const it of validate.errors) {
    faults += 1;
    console.error(`${what}${it.instancePath}: ${it.message} ${JSON.stringify(it.params)}`);
  }
}

const files = process.argv.slice(2);
let panels = 0;
for (const file of files) {
  const page = JSON.parse(readFileSync(file, 'utf8'));
  check(page.uid, validator(join(types, 'dashboard/x/types.gen.d.ts'), 'Dashboard', false), page);
  for (const panel of page.panels.flatMap(it => [it, ...(it.panels ?? [])])) {
    if (WITHOUT_TYPES.has(panel.type)) continue;
    panels += 1;
    const folder = join(types, 'composable', FOLDERS[panel.type] ?? panel.type, 'panelcfg/x/types.gen.d.ts');
    const name = `${page.uid} / ${panel.title}`;
    if (!existsSync(folder)) {
      faults += 1;
      console.error(`${name}: Grafana has no panel ${panel.type}`);
      continue;
    }
    check(`${name}: options`, validator(folder, 'Options', true), options(panel));
    check(`${name}: custom`, validator(folder, 'FieldConfig', true), panel.fieldConfig?.defaults?.custom);
  }
}
console.log(`${files.length} dashboards, ${panels} panels, ${faults} faults`);
process.exit(faults ? 1 : 0);
