package config

import (
	"strconv"
	"strings"
	"testing"
)

// FuzzPublicURL reads every accepted URL the way the device does: the first colon after the scheme starts the port
// (managed component esp-ml307, web_socket.cc), and text there that is not a number aborts the firmware.
func FuzzPublicURL(f *testing.F) {
	for _, seed := range []string{"http://h", "https://h:8443/a", "http://h/a:b", "http://[::1]", "http://u:p@h", "http://h%3A80", "http://h:080"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if checkPublicURL(value) != nil {
			return
		}
		_, rest, found := strings.Cut(value, "://")
		if !found {
			t.Fatalf("%q has no scheme for the device", value)
		}
		host, path, _ := strings.Cut(rest, "/")
		if strings.ContainsAny(path, ":?#@") {
			t.Fatalf("%q: the path %q", value, path)
		}
		name, port, found := strings.Cut(host, ":")
		if n, err := strconv.Atoi(port); found && (err != nil || n < 1 || n > 65535) {
			t.Fatalf("%q: the device reads the port %q", value, port)
		}
		if checkPublicHost(name) != nil {
			t.Fatalf("%q: the device dials %q", value, name)
		}
	})
}
