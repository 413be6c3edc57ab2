package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// script returns the completion script of a shell.
func script(t *testing.T, shell string) string {
	t.Helper()
	a, stdout, stderr := newApp()
	if code := a.run(t.Context(), []string{"completion", shell}); code != exitOK || stderr.String() != "" {
		t.Fatalf("status %d, %s", code, stderr)
	}
	return stdout.String()
}

// bashComplete lets bash complete a line, with the variables that readline sets.
const bashComplete = `
source "$1"
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_WORDBREAKS=$' \t\n"\'><=;|&(:'
_fleetd
((${#COMPREPLY[@]})) && printf '%s\n' "${COMPREPLY[@]}"
exit 0
`

func TestCompletionOfBash(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fleetd.bash")
	if err := os.WriteFile(file, []byte(script(t, "bash")), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		line string // its end is completed
		has  []string
		not  []string // nil: has is all there is
	}{
		{"fleetd de", []string{"devices"}, nil},
		{"fleetd ", []string{"serve", "keys", "chips", "log-level"}, []string{"token", "list"}},
		{"fleetd --device-l", []string{"--device-listen"}, nil},
		{"fleetd devices e", []string{"edit", "export"}, nil},
		{"fleetd devices --w", []string{"--watch"}, nil},
		{"fleetd devices --api devices sh", []string{"show"}, nil},
		{"fleetd devices --sort l", []string{"last_seen"}, nil},
		{"fleetd devices --sort=", []string{"id", "name", "last_seen", "offline_since"}, nil},
		{"fleetd devices --sort=o", []string{"offline_since"}, nil},
		{"fleetd devices --sort=id ex", []string{"export"}, nil},
		{"fleetd devices --json fo", []string{"forget"}, nil},
		{"fleetd devices export --format ", []string{"csv", "ndjson"}, nil},
		{"fleetd devices export -o ", nil, nil},
		{"fleetd log-level w", []string{"warn"}, nil},
		{"fleetd completion ", []string{"bash", "zsh", "fish"}, nil},
		{"fleetd keys create --scope tools:call:", []string{"user"}, nil},
		{"fleetd keys create --scope devices:read,a", []string{"read,audio", "read,audit:read", "read,admin"}, nil},
		{"fleetd keys create --scope a", []string{"audio", "audit:read", "admin"}, nil},
		{"fleetd call d --", []string{"--yes", "--args", "--help"}, []string{"--watch"}},
	} {
		command := exec.CommandContext(t.Context(), "bash", "--norc", "-c", bashComplete, "bash", file)
		command.Env = append(os.Environ(), "LINE="+tc.line)
		out, err := command.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		got := strings.Fields(string(out))
		for _, want := range tc.has {
			if !slices.Contains(got, want) {
				t.Errorf("%q: %q lacks %s", tc.line, got, want)
			}
		}
		for _, wrong := range tc.not {
			if slices.Contains(got, wrong) {
				t.Errorf("%q: %q has %s", tc.line, got, wrong)
			}
		}
		if tc.not == nil && len(got) != len(tc.has) {
			t.Errorf("%q: %q, want %q", tc.line, got, tc.has)
		}
	}
}

func TestCompletionOfOtherShells(t *testing.T) {
	for shell, want := range map[string][]string{
		"zsh":  {"#compdef fleetd\n", "'devices show')", "'sort:", "'devices --sort') values=('id' 'name' 'last_seen' 'offline_since') ;;", `\''s`},
		"fish": {"set -g __fleetd_commands 'serve' 'devices' 'devices list'", `complete -c fleetd -n "test (__fleetd_at) = 'devices list'" -l sort -x -a 'id name last_seen offline_since' -d `, "-l output -s o -r -d"},
	} {
		got := script(t, shell)
		for _, text := range want {
			if shell == "zsh" {
				text = strings.Replace(text, "'sort:", "'--sort:", 1)
			}
			if !strings.Contains(got, text) {
				t.Errorf("%s: no %q", shell, text)
			}
		}
	}
	a, stdout, stderr := newApp()
	code := a.run(t.Context(), []string{"completion", "tcsh"})
	if code != exitFailed || stdout.String() != "" || !strings.Contains(stderr.String(), `"bash","zsh","fish"`) {
		t.Errorf("status %d, %s", code, stderr)
	}
}
