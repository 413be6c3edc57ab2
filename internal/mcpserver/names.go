package mcpserver

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Names that all hosts accept: some refuse dots, some count the name of the server.
// They match ^[a-z][a-z0-9_-]{0,39}$.
const (
	maxHostName = 40
	nameStem    = 33 // length of the name before "_" and 6 hex digits of a hash
)

// hostName returns a name that hosts accept. It is not unique: see hostNames.
func hostName(original string) string {
	name := []byte(strings.ToLower(strings.TrimPrefix(original, "self.")))
	for i, c := range name {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			name[i] = '_'
		}
	}
	if len(name) == 0 || name[0] < 'a' || name[0] > 'z' {
		name = append([]byte("t_"), name...)
	}
	return string(name)
}

func hashedName(name, original string) string {
	sum := sha256.Sum256([]byte(original))
	return name[:min(len(name), nameStem)] + "_" + hex.EncodeToString(sum[:3])
}

// hostNames returns a unique name for each tool of a list. A name depends only on the
// whole list, so it is the same for callers that may call only some of the tools.
func hostNames(originals []string) []string {
	count := make(map[string]int, len(originals))
	names := make([]string, len(originals))
	for i, original := range originals {
		names[i] = hostName(original)
		count[names[i]]++
	}
	taken := make(map[string]bool, len(originals))
	for i, name := range names {
		if len(name) <= maxHostName && count[name] == 1 {
			taken[name] = true
			continue
		}
		names[i] = "" // set below, when the names without a hash are known
	}
	for i, name := range names {
		if name != "" {
			continue
		}
		// Only a list made for it has colliding hashes; a salt resolves the collision.
		for salt := originals[i]; ; salt += "'" {
			if name = hashedName(hostName(originals[i]), salt); !taken[name] {
				break
			}
		}
		taken[name], names[i] = true, name
	}
	return names
}
