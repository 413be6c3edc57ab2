package database

import "testing"

// FuzzTools checks that a tool list survives whatever its bytes are.
func FuzzTools(f *testing.F) {
	f.Add([]byte(`[{"name":"a"}]`))
	f.Add([]byte("\x00"))
	f.Add([]byte("\xe4\xb8"))
	f.Fuzz(func(t *testing.T, tools []byte) {
		text, encoding := EncodeTools(tools)
		if !IsText(text) {
			t.Fatalf("%q is not text", text)
		}
		back, err := DecodeTools(text, encoding)
		if err != nil || string(back) != string(tools) {
			t.Errorf("%q came back as %q, error %v", tools, back, err)
		}
		if s := Clean(string(tools)); !IsText(s) || IsText(string(tools)) && s != string(tools) {
			t.Errorf("%q cleaned is %q", tools, s)
		}
	})
}
