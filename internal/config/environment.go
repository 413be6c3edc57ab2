package config

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// envPrefix starts every environment variable that belongs to fleetd.
const envPrefix = "FLEETD_"

// clientNames are read by the client commands only; a node ignores them.
var clientNames = []string{"FLEETD_API", "FLEETD_TOKEN"}

// ignoredPrefixes are variables that others set: our tests, and Kubernetes for a service called fleetd.
var ignoredPrefixes = []string{"FLEETD_TEST_", "FLEETD_SERVICE_", "FLEETD_PORT"}

// Environ returns the process environment for [Load] and [LoadClient].
func Environ() []string { return os.Environ() }

// Client is what a client command needs to find a node.
type Client struct {
	// DataDir is where a local node left its addresses and its admin token.
	DataDir string
	// API is the base URL of a node's internal side; empty means the node of DataDir.
	API string
	// Token is the bearer token; empty means the admin token of DataDir.
	Token string
}

// LoadClient fills what the flags left empty from FLEETD_DATA_DIR, FLEETD_API and FLEETD_TOKEN, then from the
// default data directory.
func LoadClient(flags Client, environ []string) Client {
	env := variables(environ)
	pick := func(flag, name string) string {
		if flag != "" {
			return flag
		}
		return env[name]
	}
	c := Client{
		DataDir: pick(flags.DataDir, envName("data-dir")),
		API:     pick(flags.API, "FLEETD_API"),
		Token:   pick(flags.Token, "FLEETD_TOKEN"),
	}
	c.DataDir = cmp.Or(c.DataDir, defaultDataDir)
	return c
}

// envName derives the environment variable of a flag.
func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// variables returns fleetd's variables that have a value. If a name occurs twice, the later one counts.
func variables(environ []string) map[string]string {
	found := make(map[string]string)
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, envPrefix) {
			found[name] = value
		}
	}
	return found
}

// fromEnvironment returns the settings given in the environment, by flag name. A misspelled name is an error: a
// setting that silently does nothing is worse than a node that does not start.
func fromEnvironment(environ []string) (map[string]string, error) {
	known := make(map[string]string, len(settings))
	for _, s := range settings {
		known[envName(s.name)] = s.name
	}
	given := make(map[string]string)
	found := variables(environ)
	for _, name := range slices.Sorted(maps.Keys(found)) {
		flag, ok := known[name]
		switch {
		case ok && found[name] != "":
			given[flag] = found[name]
		case ok || isIgnored(name):
		default:
			candidates := slices.Concat(slices.Sorted(maps.Keys(known)), clientNames)
			nearest := slices.MinFunc(candidates, func(a, b string) int { return Distance(name, a) - Distance(name, b) })
			return nil, fmt.Errorf("the environment variable %s is not a setting of fleetd; the nearest one is %s (remove it, or see fleetd serve --help)",
				name, nearest)
		}
	}
	return given, nil
}

func isIgnored(name string) bool {
	return slices.Contains(clientNames, name) ||
		slices.ContainsFunc(ignoredPrefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// Distance is the number of letters to insert, delete, replace or swap with the next one that turn a into b
// (optimal string alignment).
func Distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replaced := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, replaced)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

// systemTimezone finds the IANA name of this machine's zone, which Go itself does not tell ([time.Local] is called
// "Local"): TZ, then the link /etc/localtime, then Debian's /etc/timezone. Without any of them the machine runs in UTC.
func systemTimezone(environ []string) string {
	for _, entry := range slices.Backward(environ) {
		if tz, ok := strings.CutPrefix(entry, "TZ="); ok {
			return firstZone(strings.TrimPrefix(tz, ":"))
		}
	}
	target, _ := os.Readlink("/etc/localtime")
	_, linked, _ := strings.Cut(target, "zoneinfo/")
	written, _ := os.ReadFile("/etc/timezone")
	return firstZone(linked, strings.TrimSpace(string(written)))
}

// firstZone returns the first name that is a loadable zone, else UTC.
func firstZone(names ...string) string {
	for _, name := range names {
		// TZ may hold an absolute path into the zone database.
		if _, after, found := strings.Cut(name, "zoneinfo/"); found {
			name = after
		}
		if validateZone(name) == nil {
			return name
		}
	}
	return "UTC"
}

// validateZone refuses what [time.LoadLocation] accepts without naming a zone: the empty name and "Local".
func validateZone(name string) error {
	if name == "" || name == "Local" {
		return fmt.Errorf("%q is not the name of a time zone", name)
	}
	_, err := time.LoadLocation(name)
	return err
}
