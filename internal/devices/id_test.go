package devices

import (
	"strings"
	"testing"
)

func TestParseID(t *testing.T) {
	for text, want := range map[string]ID{
		"AA:BB:CC:DD:EE:FF": "aa:bb:cc:dd:ee:ff", "aa-bb-cc-dd-ee-0f": "aa:bb:cc:dd:ee:0f", "aabbccddeeff": "aa:bb:cc:dd:ee:ff",
		"Robot_7": "robot_7", "a": "a", "aabbccddeefg": "aabbccddeefg", strings.Repeat("x", 64): ID(strings.Repeat("x", 64)),
	} {
		if got, err := ParseID(text); err != nil || got != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "_a", "-a", "a.b", "a b", "a*", "a>", "aa:bb-cc:dd:ee:ff", "aa:bb:cc:dd:ee", "aa:bb:cc:dd:ee:gg",
		"a\x00", "é", strings.Repeat("x", 65), "a/b", "../x"} {
		if got, err := ParseID(text); err == nil {
			t.Errorf("%q became %q", text, got)
		}
	}
}

// FuzzParseID checks that canonical ids parse to themselves, and tokens map one to one.
func FuzzParseID(f *testing.F) {
	f.Add("AA:BB:CC:DD:EE:FF")
	f.Add("robot-1")
	f.Fuzz(func(t *testing.T, text string) {
		id, err := ParseID(text)
		if err != nil {
			return
		}
		if again, err := ParseID(string(id)); err != nil || again != id {
			t.Errorf("%q is not canonical: %q, %v", id, again, err)
		}
		if back, err := ParseID(id.Token()); err != nil || back != id {
			t.Errorf("token %q of %q parses as %q, %v", id.Token(), id, back, err)
		}
		if strings.ContainsAny(id.Token(), ".*> /+#:\x00") {
			t.Errorf("token %q is not safe in a subject", id.Token())
		}
	})
}

func TestSubjectTokens(t *testing.T) {
	for _, c := range []struct{ method, want string }{
		{"notifications/button", "button"}, {"notifications/a/b", "a.b"}, {"tools/list_changed", "tools.list_changed"}, {"", "_"},
		{"notifications/", "_"}, {"a.b>*", "a_b__"}, {"a//b", "a._.b"}, {"é", "_"}, {"1/2/3/4/5/6/7/8/9", "1.2.3.4.5.6.7.8"},
		{strings.Repeat("x", 300), strings.Repeat("x", 128)}, {strings.Repeat("x", 127) + "/y", strings.Repeat("x", 127)},
	} {
		if got := NotificationTokens(c.method); got != c.want {
			t.Errorf("%.20q: %q, want %q", c.method, got, c.want)
		}
	}
}
