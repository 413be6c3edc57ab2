// Package selector reads and evaluates `select`: the text that selects devices
// in lists, counts, jobs, events, export, API keys and policy.
//
//	room=lab, floor in (1,2), !retired, firmware<2.4.2, seen>2h
//
// Terms are joined by commas, and all of them must hold:
//
//	room=lab          the value is lab; * stands for any run of characters
//	room!=lab         the value is not lab, or there is none
//	room in (a,b)     the value is one of these
//	room not in (a,b) the value is none of these, or there is none
//	room, !room       there is a value; there is none
//	firmware<2.4.2    also <=, > and >=, in the order of the firmware itself
//	seen>2h, seen<7d  last seen longer ago than that; more recently than that
//
// A name is one of the fields device, name, board, chip, firmware, elf,
// transport, state, node, reason, seen and tool, else a label; label.NAME is
// always a label. A value that is empty or contains a space or one of ,()="\
// is written in double quotes, in which \" \\ \* and \xNN are the character
// itself. A device without a value matches !=, `not in` and !NAME, and nothing
// else.
package selector

import (
	"slices"
	"strings"
	"time"
)

// Bounds of what Parse accepts.
const (
	MaxText   = 4096 // bytes of a text, as written and in canonical form
	MaxTerms  = 32
	MaxValues = 200 // in one `in (...)`
	MaxLabel  = 63  // bytes of a label's key
)

// Field is what a term is about. Terms are ordered by it, so that the cheap
// ones are evaluated first.
type Field uint8

// Fields.
const (
	FieldDevice    Field = iota // the device's id
	FieldLabel                  // a label, named by Term.Label
	FieldState                  // online, offline, pending or contested
	FieldTransport              // of the connection: websocket or mqtt
	FieldNode                   // that holds the connection
	FieldReason                 // why the device is offline
	FieldName
	FieldBoard
	FieldChip
	FieldFirmware
	FieldELF
	FieldSeen
	FieldTool // a tool's name
)

var fieldNames = [...]string{
	FieldDevice: "device", FieldLabel: "label", FieldState: "state", FieldTransport: "transport", FieldNode: "node", FieldReason: "reason",
	FieldName: "name", FieldBoard: "board", FieldChip: "chip", FieldFirmware: "firmware", FieldELF: "elf", FieldSeen: "seen", FieldTool: "tool",
}

// String is the field's name in text.
func (f Field) String() string { return fieldNames[f] }

// fieldOf finds a field by its name. `label` is only a prefix.
func fieldOf(name string) (Field, bool) {
	i := slices.Index(fieldNames[:], name)
	if i < 0 || Field(i) == FieldLabel {
		return FieldLabel, false
	}
	return Field(i), true
}

// Op is how a term compares.
type Op uint8

// Operators.
const (
	OpIn           Op = iota // one of Values matches: `=` with one value, else `in`
	OpNotIn                  // none of Values matches, or there is no value: `!=`, `not in`
	OpHas                    // there is a value
	OpLacks                  // there is no value
	OpLess                   // Version; or Age: seen more recently than that
	OpLessEqual              // Version
	OpGreater                // Version; or Age: seen longer ago than that
	OpGreaterEqual           // Version
)

var opNames = [...]string{OpLess: "<", OpLessEqual: "<=", OpGreater: ">", OpGreaterEqual: ">="}

// Term is one condition.
type Term struct {
	Field  Field
	Label  string // the label's key; empty for other fields
	Op     Op
	Values []Value // of OpIn and OpNotIn, sorted, each once

	Version string        // of comparisons of the firmware; the firmware can read it
	Age     time.Duration // of comparisons of seen

	text string                 // canonical
	tool func(name string) bool // whether one of Values matches, for FieldTool
}

// String is the term's canonical text.
func (t Term) String() string { return t.text }

// Selector selects devices. The zero value selects every device. It does not
// change, and copies share its terms.
type Selector struct{ terms []Term }

// newSelector sorts the terms, drops repeated ones, and takes over the slice.
func newSelector(terms []Term) Selector {
	if len(terms) == 0 {
		return Selector{}
	}
	slices.SortFunc(terms, func(a, b Term) int {
		if a.Field != b.Field {
			return int(a.Field) - int(b.Field)
		}
		if c := strings.Compare(a.Label, b.Label); c != 0 {
			return c
		}
		return strings.Compare(a.text, b.text)
	})
	return Selector{slices.CompactFunc(terms, func(a, b Term) bool { return a.text == b.text })}
}

// FromMap selects the devices that have all of these labels; the name `device`
// stands for the device's id. Values are literal: * has no meaning. It is the
// form in which keys and policies were written before there was a text.
func FromMap(values map[string]string) Selector {
	terms := make([]Term, 0, len(values))
	for name, value := range values {
		t := Term{Field: FieldLabel, Label: name, Values: []Value{{Text: value}}}
		if name == FieldDevice.String() {
			t.Field, t.Label, t.Values[0].Text = FieldDevice, "", normalID(value)
		}
		terms = append(terms, t.finish())
	}
	return newSelector(terms)
}

// In selects the devices of which a field, which is none of labels, has one of
// these values, literally.
func In(f Field, values ...string) Selector {
	t := Term{Field: f}
	for _, value := range values {
		t.Values = append(t.Values, Value{Text: value})
	}
	return newSelector([]Term{t.finish()})
}

// Not selects the devices that a term does not select; ok is false for terms that
// compare.
func Not(t Term) (not Selector, ok bool) {
	switch t.Op {
	case OpIn:
		t.Op = OpNotIn
	case OpNotIn:
		t.Op = OpIn
	case OpHas:
		t.Op = OpLacks
	case OpLacks:
		t.Op = OpHas
	default:
		return Selector{}, false
	}
	t.Values = slices.Clone(t.Values)
	return newSelector([]Term{t.finish()}), true
}

// And selects the devices that both select. It is not bounded: the text of a
// result with more terms or bytes than Parse accepts cannot be parsed.
func And(a, b Selector) Selector {
	switch {
	case a.IsZero():
		return b
	case b.IsZero():
		return a
	}
	return newSelector(slices.Concat(a.terms, b.terms))
}

// IsZero tells whether every device is selected. It makes `omitzero` work.
func (s Selector) IsZero() bool { return len(s.terms) == 0 }

// Terms returns the conditions, all of which must hold.
func (s Selector) Terms() []Term { return slices.Clone(s.terms) }

// String is the canonical text: Parse reads it as the same selector, and two
// selectors with the same terms have the same text.
func (s Selector) String() string {
	var b strings.Builder
	for i, t := range s.terms {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(t.text)
	}
	return b.String()
}

// Needs tells whether the value of a field is needed to evaluate the selector.
func (s Selector) Needs(f Field) bool {
	return slices.ContainsFunc(s.terms, func(t Term) bool { return t.Field == f })
}

// NeedsLabels tells whether the device's labels are needed.
func (s Selector) NeedsLabels() bool { return s.Needs(FieldLabel) }

// Identity returns a *FieldError unless only the device's id and its labels are
// used: operators set these, and nothing else may decide who may do what.
func (s Selector) Identity() error {
	for _, t := range s.terms {
		if t.Field != FieldDevice && t.Field != FieldLabel {
			return &FieldError{Field: t.Field}
		}
	}
	return nil
}

// FieldError names a field that may not be used in API keys and policy.
type FieldError struct{ Field Field }

// Error says why.
func (e *FieldError) Error() string {
	why := "is reported by the device itself"
	switch e.Field {
	case FieldName:
		why = "is a text for people"
	case FieldState, FieldTransport, FieldNode, FieldReason, FieldSeen:
		why = "changes with the connection of the device"
	}
	return "only device and labels may be used in API keys and policy: " + e.Field.String() + " " + why
}

// Check returns an error for what Parse would not accept. Selectors from JSON
// objects and from FromMap may contain it: label keys that no device can have,
// more terms, or longer values.
func (s Selector) Check() error {
	_, err := Parse(s.String())
	return err
}
