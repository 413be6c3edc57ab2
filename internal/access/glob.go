package access

import (
	"errors"
	"fmt"
)

// Limits of a list of globs.
const (
	maxGlobs = 64
	maxGlob  = 128 // bytes
)

// Match reports whether a glob matches a whole name: `*` matches any sequence of bytes, `?`
// any byte, every other byte itself.
func Match(glob, name string) bool {
	star, mark := -1, 0
	g, n := 0, 0
	for n < len(name) {
		switch {
		case g < len(glob) && glob[g] == '*':
			star, mark = g, n
			g++
		case g < len(glob) && (glob[g] == '?' || glob[g] == name[n]):
			g++
			n++
		case star >= 0: // the star matches one more byte
			mark++
			g, n = star+1, mark
		default:
			return false
		}
	}
	for g < len(glob) && glob[g] == '*' {
		g++
	}
	return g == len(glob)
}

// MatchAny reports whether one of the globs matches; no globs match every name.
func MatchAny(globs []string, name string) bool {
	for _, glob := range globs {
		if Match(glob, name) {
			return true
		}
	}
	return len(globs) == 0
}

func checkGlobs(globs []string) error {
	if len(globs) > maxGlobs {
		return fmt.Errorf("a list of tools has at most %d entries", maxGlobs)
	}
	for _, glob := range globs {
		if glob == "" {
			return errors.New("an empty entry matches no tool; leave it out, or write * for every tool")
		}
		if len(glob) > maxGlob || !isPlain(glob) {
			return fmt.Errorf("%.40q: a glob has at most %d bytes and no control characters", glob, maxGlob)
		}
	}
	return nil
}
