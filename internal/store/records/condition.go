package records

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/selector"
	"fleetd/internal/store/database"
)

// query is SQL with its arguments.
type query struct {
	text strings.Builder
	args []any
}

// add appends text, in which each ? is replaced by the next argument.
func (q *query) add(text string, args ...any) {
	for _, arg := range args {
		before, after, _ := strings.Cut(text, "?")
		q.args = append(q.args, arg)
		q.text.WriteString(before + "$" + strconv.Itoa(len(q.args)))
		text = after
	}
	q.text.WriteString(text)
}

// condition is the SQL condition of a term: it is true for every device that the term matches, and
// if exact for no other. The device is w.device; d is its row of devices, p that of presence.
type condition struct {
	text              string // with ? for each argument
	args              []any
	set               string // the same as text, for all devices at once; empty: text
	devices, presence bool   // the tables that it reads
	exact             bool
}

// nothing is the condition of a term that only memory can evaluate.
var nothing = condition{text: "TRUE"}

// conditionOf returns the condition of a term. tools are the catalogs with a matching tool; nil: they
// are unknown.
func conditionOf(postgres bool, t *selector.Term, now time.Time, tools *toolMatch) condition {
	c := condition{exact: true}
	var value string // an SQL expression; empty: no value
	switch t.Field {
	case selector.FieldDevice:
		value = "w.device"
	case selector.FieldLabel:
		return labelCondition(postgres, t)
	case selector.FieldState:
		if values, ok := literals(t); ok && slices.Contains(values, database.StateOnline) && slices.Contains(values, database.StateOffline) {
			return c // every device matches
		}
		value, c.presence = "(CASE WHEN p.online THEN 'online' ELSE 'offline' END)", true
	case selector.FieldTransport:
		value, c.presence = "(CASE WHEN p.online THEN p.transport ELSE '' END)", true
	case selector.FieldNode:
		value, c.presence = "(CASE WHEN p.online THEN p.node ELSE '' END)", true
	case selector.FieldReason:
		value, c.presence = "(CASE WHEN p.online THEN '' ELSE p.reason END)", true
	case selector.FieldName:
		value, c.devices = "d.name", true
	case selector.FieldBoard:
		value, c.devices = "d.board", true
	case selector.FieldChip:
		value, c.devices = "d.chip", true
	case selector.FieldFirmware:
		value, c.devices = "d.firmware", true
	case selector.FieldELF:
		value, c.devices = "d.elf_sha256", true
	case selector.FieldSeen:
		return seenCondition(t, now)
	case selector.FieldTool:
		return toolCondition(postgres, t, tools)
	default:
		return nothing
	}
	switch t.Op {
	case selector.OpHas:
		c.text = value + " <> ''"
	case selector.OpLacks:
		c.text = value + " = ''"
	case selector.OpIn, selector.OpNotIn:
		var match string
		match, c.args = matchText(postgres, value, t.Values)
		if c.text = "(" + value + " <> '' AND " + match + ")"; t.Op == selector.OpNotIn {
			c.text = "NOT " + c.text
		}
	default:
		key, ok := selector.VersionKey(t.Version)
		if !ok || t.Field != selector.FieldFirmware {
			return nothing
		}
		c.text, c.args = "(d.firmware_key <> '' AND d.firmware_key "+comparison(t.Op)+" ?)", []any{key}
	}
	return c
}

func comparison(op selector.Op) string {
	switch op {
	case selector.OpLess:
		return "<"
	case selector.OpLessEqual:
		return "<="
	case selector.OpGreater:
		return ">"
	}
	return ">="
}

// matchText returns a condition that one of the values matches an expression. A value that is not
// text matches nothing that is stored.
func matchText(postgres bool, value string, values []selector.Value) (text string, args []any) {
	var any []string
	literals := 0
	for i := range values {
		if v := &values[i]; v.Parts == nil && database.IsText(v.Text) {
			args = append(args, v.Text)
			literals++
		}
	}
	if literals > 0 {
		any = append(any, value+" IN (?"+strings.Repeat(", ?", literals-1)+")")
	}
	for i := range values {
		if v := &values[i]; v.Parts != nil && !slices.ContainsFunc(v.Parts, func(part string) bool { return !database.IsText(part) }) {
			operator := " GLOB ?"
			if postgres {
				operator = " LIKE ?"
			}
			any = append(any, value+operator)
			args = append(args, pattern(postgres, v.Parts))
		}
	}
	if any == nil {
		return "FALSE", nil
	}
	return "(" + strings.Join(any, " OR ") + ")", args
}

var (
	likeEscapes = strings.NewReplacer(`\`, `\\`, "%", `\%`, "_", `\_`)
	globEscapes = strings.NewReplacer("[", "[[]", "?", "[?]", "*", "[*]")
)

// pattern returns a glob in the form of the database: both are case sensitive.
func pattern(postgres bool, parts []string) string {
	escapes, star := globEscapes, "*"
	if postgres {
		escapes, star = likeEscapes, "%"
	}
	escaped := make([]string, len(parts))
	for i, part := range parts {
		escaped[i] = escapes.Replace(part)
	}
	return strings.Join(escaped, star)
}

// labelCondition finds a label by its value with an index; other conditions read the device's row.
func labelCondition(postgres bool, t *selector.Term) condition {
	literal := func(v selector.Value) bool { return v.Parts == nil && database.IsText(v.Text) }
	if !plainLabel(t.Label) {
		return nothing
	}
	if (t.Op == selector.OpIn || t.Op == selector.OpNotIn) && !slices.ContainsFunc(t.Values, func(v selector.Value) bool { return !literal(v) }) {
		args := []any{t.Label}
		for _, v := range t.Values {
			args = append(args, v.Text)
		}
		// Postgres makes a join of EXISTS, and may then start with the label.
		c := condition{text: "(SELECT 1 FROM device_labels l WHERE l.device = w.device AND l.key = ? AND l.value IN (?" +
			strings.Repeat(", ?", len(t.Values)-1) + ")) IS NOT NULL", args: args, exact: true}
		c.set = "EXISTS " + strings.TrimSuffix(c.text, " IS NOT NULL")
		if !postgres { // it would look up each device
			c.set = strings.Replace(strings.Replace(c.set, "EXISTS (SELECT 1 FROM", "w.device IN (SELECT l.device FROM", 1), "l.device = w.device AND ", "", 1)
		}
		if t.Op == selector.OpNotIn {
			c.text, c.set = "NOT ("+c.text+")", "NOT "+c.set
		}
		return c
	}
	c := condition{devices: true, exact: true}
	value := "(d.labels ->> '$.\"" + t.Label + "\"')"
	if postgres {
		value = "(CAST(d.labels AS JSON) ->> '" + t.Label + "')"
	}
	switch t.Op {
	case selector.OpHas:
		c.text = value + " IS NOT NULL"
	case selector.OpLacks:
		c.text = value + " IS NULL"
	default:
		for _, v := range t.Values {
			if v.Parts == nil && !database.IsText(v.Text) {
				return nothing
			}
		}
		var match string
		match, c.args = matchText(postgres, value, t.Values)
		if c.text = "COALESCE(" + match + ", FALSE)"; t.Op == selector.OpNotIn {
			c.text = "NOT " + c.text
		}
	}
	return c
}

// plainLabel reports whether a key can be written into SQL unquoted. All keys that Parse accepts can.
func plainLabel(key string) bool {
	return key != "" && strings.Trim(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") == ""
}

// seenCondition compares the time since a device was seen; an online device is seen now.
func seenCondition(t *selector.Term, now time.Time) condition {
	c := condition{presence: true, exact: true, args: []any{clock.Micros(t.Cutoff(now))}}
	switch t.Op {
	case selector.OpHas:
		return condition{text: "(p.online OR p.last_seen > 0)", presence: true, exact: true}
	case selector.OpLacks:
		return condition{text: "NOT (p.online OR p.last_seen > 0)", presence: true, exact: true}
	case selector.OpLess:
		c.text = "(p.online OR (p.last_seen > 0 AND p.last_seen > ?))"
		if t.Age <= 0 {
			c.text = "(NOT p.online AND p.last_seen > 0 AND p.last_seen > ?)"
		}
	default:
		c.text = "(NOT p.online AND p.last_seen > 0 AND p.last_seen < ?)"
	}
	return c
}

func toolCondition(postgres bool, t *selector.Term, tools *toolMatch) condition {
	if tools == nil {
		return nothing
	}
	text, arg := database.IDSet(postgres, "p.catalog", "?", tools.hashes)
	if t.Op == selector.OpNotIn || t.Op == selector.OpLacks {
		text = "NOT " + text
		if postgres {
			text = "NOT (" + text[len("NOT "):] + ")"
		}
	}
	return condition{text: text, args: []any{arg}, presence: true, exact: true}
}

// textCondition searches for a part of text, in lower case.
func textCondition(postgres bool, column, text string) condition {
	c := condition{text: "instr(" + column + ", ?) > 0", args: []any{text}}
	if postgres {
		c.text = "strpos(" + column + ", ?) > 0"
	}
	return c
}
