package selector

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// MarshalJSON encodes an object such as {"room":"lab"} if the selector contains only equal values of labels and
// the device's id, else the canonical text. The zero value is {}.
func (s Selector) MarshalJSON() ([]byte, error) {
	var v any = s.String()
	if values, ok := s.Map(); ok {
		v = values
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false) // the calling encoder escapes if necessary
	err := encoder.Encode(v)
	return b.Bytes(), err
}

// Map returns the argument of FromMap for the selector; ok reports whether there is one.
func (s Selector) Map() (values map[string]string, ok bool) {
	values = make(map[string]string, len(s.terms))
	for _, t := range s.terms {
		name := t.Label
		switch {
		case t.Field == FieldDevice:
			name = FieldDevice.String()
		case t.Field != FieldLabel || name == FieldDevice.String():
			return nil, false
		}
		if t.Op != OpIn || len(t.Values) != 1 || t.Values[0].Parts != nil || !utf8.ValidString(name) || !utf8.ValidString(t.Values[0].Text) {
			return nil, false
		}
		if _, repeated := values[name]; repeated {
			return nil, false
		}
		values[name] = t.Values[0].Text
	}
	return values, true
}

// UnmarshalJSON decodes text, or an object with labels and id like the argument of FromMap.
func (s *Selector) UnmarshalJSON(data []byte) error {
	switch {
	case string(data) == "null":
		return nil
	case len(data) > 0 && data[0] == '"':
		var text string
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
		parsed, err := Parse(text)
		*s = parsed
		return err
	}
	var values map[string]string
	if err := json.Unmarshal(data, &values); err != nil {
		return errors.New(`a selector is text such as "room=lab", or an object such as {"room":"lab"}`)
	}
	if len(values) > MaxTerms {
		return fmt.Errorf("a selector has at most %d labels, not %d", MaxTerms, len(values))
	}
	*s = FromMap(values)
	return nil
}
