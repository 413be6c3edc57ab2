package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker where the sources have no repository around them, as in an image build:
// -ldflags "-X main.linkedVersion=v1.2.3 -X main.linkedCommit=abc". Never assigned otherwise.
var linkedVersion, linkedCommit string

// build is what this program was made from.
type build struct {
	version, commit string
	// modified: the sources differed from the commit.
	modified bool
}

// currentBuild reads what the linker and the go command left in the program.
func currentBuild() build {
	b := build{version: linkedVersion, commit: linkedCommit}
	if info, ok := debug.ReadBuildInfo(); ok {
		b = b.completed(info)
	}
	b.version, b.commit = cmp.Or(b.version, "dev"), cmp.Or(b.commit, "unknown")
	return b
}

// completed fills what the linker did not set from the go command's record.
func (b build) completed(info *debug.BuildInfo) build {
	if b.version == "" && info.Main.Version != "(devel)" {
		b.version = info.Main.Version
	}
	if b.commit != "" {
		return b
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.commit = s.Value
		case "vcs.modified":
			b.modified = s.Value == "true"
		}
	}
	return b
}

type versionCmd struct{}

// Run prints three lines.
func (*versionCmd) Run(a *app) error {
	b := currentBuild()
	modified := ""
	if b.modified {
		modified = " (modified)"
	}
	fmt.Fprintf(a.stdout, "fleetd %s\ncommit %s%s\ngo     %s %s/%s\n",
		b.version, b.commit, modified, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}
