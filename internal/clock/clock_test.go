package clock

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// wallTimes are the places where a time of the wall clock becomes a number of nanoseconds, which nobody takes for a duration.
var wallTimes = map[string]string{"internal/devices/step.go": "a position in the log, which other nodes read"}

// No duration follows the wall clock: where a time becomes a number, it is a Reading, and a time without its monotonic reading
// is one of Now.
func TestDurationsFollowNoWallClock(t *testing.T) {
	lost := regexp.MustCompile(`\.UnixNano\(\)|time\.Unix\(0,|time\.Now\(\)\.(UTC|Round|Truncate|Unix|Format)`)
	for _, dir := range []string{"internal", "cmd"} {
		err := filepath.WalkDir(filepath.Join("..", "..", dir), func(path string, entry fs.DirEntry, err error) error {
			name := filepath.ToSlash(strings.TrimPrefix(path, filepath.Join("..", "..")+string(filepath.Separator)))
			switch {
			case err != nil:
				return err
			case entry.IsDir():
				if strings.HasSuffix(name, "test") || entry.Name() == "clock" || entry.Name() == "testdata" { // of tests
					return filepath.SkipDir
				}
				return nil
			case !strings.HasSuffix(name, ".go"), strings.HasSuffix(name, "_test.go"), wallTimes[name] != "":
				return nil
			}
			text, err := os.ReadFile(path)
			for n, line := range strings.Split(string(text), "\n") {
				if lost.MatchString(line) {
					t.Errorf("%s:%d: %s", name, n+1, strings.TrimSpace(line))
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A step moves the wall clock, and no reading.
func TestStep(t *testing.T) {
	defer step.Store(0)
	before, reading := Now(), Reading(time.Now())
	set("-1h")
	if d := Now().Sub(before); d > -59*time.Minute {
		t.Errorf("the clock moved by %v", d)
	}
	if d := Reading(time.Now()) - reading; d < 0 || d > int64(time.Minute) {
		t.Errorf("the readings moved by %v", time.Duration(d))
	}
	if at := time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC); Reading(at.Add(time.Second))-Reading(at) != int64(time.Second) || Reading(at) <= 0 {
		t.Error("times of tests have no readings")
	}
}
