package firmware

import (
	"fmt"
	"strconv"
	"strings"
)

// fault is one way in which a device misbehaves; a device has a set of them.
type fault uint32

const (
	faultSilent fault = 1 << iota
	faultSlow
	faultLateReply
	faultUnescapedError
	faultCursorLoop
	faultOversizeTool
	faultDupHello
	faultClone
	faultFlap
	faultBadFrame
	faultUDPLoss
	faultUDPReorder
	faultNAT
	faultHostileText
	faultCrashBoot
	faultCrashLater
	faultRejectImage
	faultCutDownload
	faultWrongBoard
	faultForeignServer
	faultPowerCut
)

// FaultNames lists the faults that --fault takes, in the order of the documentation.
func FaultNames() []string {
	return []string{"silent", "slow", "late-reply", "unescaped-error", "cursor-loop", "oversize-tool",
		"dup-hello", "clone", "flap", "bad-frame", "udp-loss", "udp-reorder", "nat", "hostile-text",
		"crash-boot", "crash-later", "reject-image", "cut-download", "wrong-board", "foreign-server", "power-cut"}
}

func (f fault) has(x fault) bool { return f&x != 0 }

// FaultRule gives a fault to the first n devices, or to all when n is negative.
type FaultRule struct {
	fault fault
	n     int
}

// ParseFaults reads a list like silent,slow:10: the first fault for every device, the second for the first ten.
func ParseFaults(list string) ([]FaultRule, error) {
	var rules []FaultRule
	if list == "" {
		return nil, nil
	}
	names := FaultNames()
	for item := range strings.SplitSeq(list, ",") {
		name, count, limited := strings.Cut(strings.TrimSpace(item), ":")
		rule := FaultRule{n: -1}
		for i, known := range names {
			if known == name {
				rule.fault = 1 << i
			}
		}
		if rule.fault == 0 {
			return nil, fmt.Errorf("%q is unknown; known are %s", name, strings.Join(names, ", "))
		}
		if limited {
			n, err := strconv.Atoi(count)
			if err != nil || n < 0 {
				return nil, fmt.Errorf("%q: the part after the colon is a number of devices", item)
			}
			rule.n = n
		}
		rules = append(rules, rule)
	}
	return rules, nil
}

// faultsOf returns the faults of device number index.
func faultsOf(rules []FaultRule, index int) fault {
	var f fault
	for _, r := range rules {
		if r.n < 0 || index < r.n {
			f |= r.fault
		}
	}
	return f
}
