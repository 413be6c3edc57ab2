package speech

import "testing"

func TestFirmwareFaults(t *testing.T) {
	for _, c := range []struct {
		firmware                  string
		losesWakeWord, takesShort bool
	}{
		{"1.9.4", false, false}, {"2.2.1", false, false}, {"2.2.2", true, false}, {"2.2.6", true, false}, {"2.3.0", true, false},
		{"2.4.0", false, true}, {"2.4.2", false, true}, {"10.0", false, true}, {"", false, false}, {"odd", false, false},
	} {
		if losesWakeWord(c.firmware) != c.losesWakeWord || isFrom(c.firmware, "2.4.0") != c.takesShort {
			t.Errorf("%q: loses its wake word %t, takes short packets %t", c.firmware, losesWakeWord(c.firmware), isFrom(c.firmware, "2.4.0"))
		}
	}
}
