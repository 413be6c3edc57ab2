package config

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"fleetd/internal/goldentest"
)

// docs/reference/settings.md is what the program has.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Settings\n\nGenerated from the program by `make reference`; do not edit.\n\n" +
		"The flag `--x-y` of `fleetd serve` equals the environment variable `FLEETD_X_Y`; the flag wins. An empty variable counts as not set; an unknown `FLEETD_*` variable stops the start.\n" +
		"Durations are written `90s`, `15m`, `24h`, `7d`; sizes `512MiB`, `10GiB`.\n")
	group := ""
	for _, f := range Flags() {
		if f.Group != group {
			group = f.Group
			fmt.Fprintf(&b, "\n## %s\n\n| flag | default | meaning |\n|---|---|---|\n", group)
		}
		value := "(none)"
		if f.Default != "" {
			value = "`" + f.Default + "`"
		}
		fmt.Fprintf(&b, "| `--%s` | %s | %s |\n", f.Name, value, strings.ReplaceAll(strings.TrimSpace(f.Help+" "+f.More), "|", `\|`))
	}
	goldentest.Compare(t, "../../docs/reference/settings.md", b.Bytes())
}
