package mcpserver

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Hosts take names of different kinds: some refuse dots, some count the
// server's name in. These suit all of them: ^[a-z][a-z0-9_-]{0,39}$.
const (
	maxHostName = 40
	nameStem    = 33 // of a name with a hash: stem, "_", 6 digits
)

// hostName is a device's tool name as hosts take it. It is not unique: see
// hostNames.
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

// hostNames names all tools of one list, each differently, so that a name
// depends on nothing but the list: whoever may call only some of the tools
// knows them by the same names.
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
		names[i] = "" // below, when the plain names are known
	}
	for i, name := range names {
		if name != "" {
			continue
		}
		// A list whose hashes collide was made to; it gets another one.
		for salt := originals[i]; ; salt += "'" {
			if name = hashedName(hostName(originals[i]), salt); !taken[name] {
				break
			}
		}
		taken[name], names[i] = true, name
	}
	return names
}
