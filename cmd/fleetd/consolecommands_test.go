package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

var (
	shownCommand = regexp.MustCompile(`cli=\$\{\[(.*?)\]\}`)
	// A flag with its value, a text, an optional word, or an expression.
	shownWord = regexp.MustCompile(`\.\.\.flag\("([^"]+)", [^)]*\)|"([^"]+)"|\.\.\.\([\w.]+ \? \["?([^"\]]+)"?\] : \[\]\)|([A-Za-z_.]+)`)
)

// TestCommandsOfTheConsole parses every command that a page shows under "As command".
func TestCommandsOfTheConsole(t *testing.T) {
	pages, err := filepath.Glob("../../internal/console/static/app/pages/*.js")
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	found := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range shownCommand.FindAllStringSubmatch(string(text), -1) {
			found++
			var args []string
			for _, word := range shownWord.FindAllStringSubmatch(command[1], -1) {
				switch {
				case strings.Contains(word[1], "sort"):
					args = append(args, word[1], "id")
				case strings.HasSuffix(word[1], "via"):
					args = append(args, word[1], "job")
				case word[1] != "":
					args = append(args, word[1], "1")
				case word[2] != "":
					args = append(args, word[2])
				case strings.HasPrefix(word[3], "-"):
					args = append(args, word[3])
				default:
					args = append(args, "1h")
				}
			}
			parser, err := newParser(commandsFor(nil), kong.Writers(io.Discard, io.Discard))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parser.Parse(normalized(args)); err != nil {
				t.Errorf("%s: fleetd %s: %v", filepath.Base(page), strings.Join(args, " "), err)
			}
		}
	}
	if found < 15 {
		t.Errorf("%d commands were found", found)
	}
}
