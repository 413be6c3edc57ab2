package selector

import "testing"

func TestParseLabel(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"room", "room"},
		{"room=lab", "room=lab"},
		{"room=", `room=""`},
		{"room=a*b,c", `room="a\*b,c"`},
		{"room=a=b", `room="a=b"`},
		{"state=online", "label.state=online"},
		{"device=x", "label.device=x"},
		{"device", "label.device"},
	} {
		s, err := ParseLabel(tc.text)
		if err != nil || s.String() != tc.want {
			t.Errorf("%q: %q, %v; want %q", tc.text, s, err, tc.want)
			continue
		}
		if again, err := Parse(s.String()); err != nil || again.String() != tc.want {
			t.Errorf("%q: read again it is %q, %v", tc.text, again, err)
		}
	}
	for _, text := range []string{"", "=lab", "ro om", "a,b", "!room", "label.room=x"} {
		if s, err := ParseLabel(text); err == nil {
			t.Errorf("%q is %q, want an error", text, s)
		}
	}
}
