package node

import (
	"strings"
	"testing"

	"fleetd/internal/config"
)

// The warning about a loopback address contains the setting that caused it, and does not
// suggest a setting that is already set.
func TestLoopbackWarningNamesItsSetting(t *testing.T) {
	for name, test := range map[string]struct {
		cfg    config.Config
		url    string
		has    string
		hasNot string
	}{
		"none given":        {config.Config{}, "http://127.0.0.1:8000", "set --public-host", ""},
		"host given":        {config.Config{PublicHost: "127.0.0.1"}, "http://127.0.0.1:8000", "--public-host is 127.0.0.1", "set --public-host"},
		"name given":        {config.Config{PublicHost: "localhost"}, "https://localhost:8000", "--public-host is localhost", "set --public-host"},
		"URL given":         {config.Config{PublicDeviceURL: "https://127.0.0.2/x", PublicHost: "192.0.2.1"}, "https://127.0.0.2/x", "--public-device-url is https://127.0.0.2/x", "--public-host"},
		"an address":        {config.Config{PublicHost: "192.0.2.1"}, "http://192.0.2.1:8000", "", "loopback"},
		"a name":            {config.Config{PublicHost: "localhost.example.com"}, "http://localhost.example.com:8000", "", "loopback"},
		"a name with a 127": {config.Config{PublicHost: "127.example.com"}, "http://127.example.com:8000", "", "loopback"},
	} {
		t.Run(name, func(t *testing.T) {
			warning := loopbackWarning(&test.cfg, test.url)
			if !strings.Contains(warning, test.has) || test.has == "" && warning != "" || test.hasNot != "" && strings.Contains(warning, test.hasNot) {
				t.Errorf("%q: want %q in it, and not %q", warning, test.has, test.hasNot)
			}
		})
	}
}
