package selector

import (
	"fmt"
	"strings"
)

// ParseLabel parses the label filter of lists: `key`, or `key=value` with a literal value. Every name is that of
// a label.
func ParseLabel(text string) (Selector, error) {
	key, value, has := strings.Cut(text, "=")
	if !validLabel(key) {
		return Selector{}, fmt.Errorf("label must be KEY or KEY=VALUE, with a key of 1 to %d characters of A-Z, a-z, 0-9, _ and -", MaxLabel)
	}
	t := Term{Field: FieldLabel, Label: key, Op: OpHas}
	if has {
		t.Op, t.Values = OpIn, []Value{{Text: value}}
	}
	return newSelector([]Term{t.finish()}), nil
}
