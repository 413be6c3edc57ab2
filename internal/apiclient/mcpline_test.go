package apiclient

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"testing"
)

// A line that is too long is one lost message, and not the end of the host.
func TestReadLine(t *testing.T) {
	r := bufio.NewReader(strings.NewReader("one\n" + strings.Repeat("x", maxMCPLine+1) + "\ntwo\nthree"))
	for _, want := range []struct {
		line  string
		whole bool
		end   bool
	}{{"one\n", true, false}, {"", false, false}, {"two\n", true, false}, {"three", true, true}} {
		line, whole, err := readLine(r)
		if whole != want.whole || errors.Is(err, io.EOF) != want.end || whole && string(line) != want.line || len(line) > maxMCPLine {
			t.Errorf("%d bytes, whole %t, %v; want %q", len(line), whole, err, want.line)
		}
	}
}
