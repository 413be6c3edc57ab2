package main

import (
	"errors"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"fleetd/internal/apiclient"
)

var (
	// parameter matches the part of a request with which the server begins an error about it.
	parameter = regexp.MustCompile(`^(unknown )?(?:query\.|body\.|path\.)?([a-z_]+)`)
	// listedAt matches where the server says that ids are listed.
	listedAt = regexp.MustCompile(`; GET /v1/(\w+) lists them$`)
)

// inWordsOf returns an error with the words of the command line in place of the API's: a wrong request is a wrong flag or
// argument, and a command lists what there is.
func inWordsOf(command *kong.Context, err error) error {
	problem := (*apiclient.Problem)(nil)
	if !errors.As(err, &problem) {
		return err
	}
	switch problem.Code {
	case "bad_request":
		at := parameter.FindStringSubmatch(problem.Detail)
		if at == nil {
			return err
		}
		if name := argument(command, at[2]); name != "" {
			problem.Detail = at[1] + name + problem.Detail[len(at[0]):]
			return exitError{err, exitFailed}
		}
	case "invalid_arguments":
		for i, fault := range problem.Errors {
			name := argument(command, fault.Pointer)
			if name == "" || problem.Call != "" { // the arguments of a call belong to its tool
				return err
			}
			problem.Detail, _, _ = strings.Cut(problem.Detail, ": "+fault.Pointer) // the first is in both
			problem.Errors[i].Pointer = name
		}
		if len(problem.Errors) > 0 {
			return exitError{err, exitFailed}
		}
	case "device_unknown":
		lists := "devices"
		if command.Selected().Name == "approve" {
			lists += " --state pending"
		}
		problem.Detail += "; `fleetd " + lists + "` lists them"
	case "not_found":
		lists := strings.Fields(command.Command())[0]
		if at := listedAt.FindStringSubmatch(problem.Detail); at != nil {
			lists = at[1]
		} else if !slices.Contains([]string{"chips", "firmware", "jobs", "keys", "photos"}, lists) {
			return err
		}
		problem.Detail = listedAt.ReplaceAllString(problem.Detail, "") + "; `fleetd " + lists + "` lists them"
	case "":
		if problem.Status == 404 {
			problem.Detail += "; the answer is not from the API of fleetd: check the address in --api or FLEETD_API"
		}
	}
	return err
}

// argument returns the flag or argument of a command that sets a member of the API, which is a name or a JSON pointer;
// empty if there is none.
func argument(command *kong.Context, member string) string {
	for part := range strings.SplitSeq(strings.ReplaceAll(member, "_", "-"), "/") {
		if part == "arguments" || part == "message" {
			return "" // what follows are names of a tool or a device
		}
		for _, flag := range command.Flags() {
			if part == flag.Name || strings.HasPrefix(part, flag.Name+"-") {
				return "--" + flag.Name
			}
		}
		for _, p := range command.Selected().Positional {
			if slices.Contains(strings.Split(p.Name, "|"), part) {
				return "<" + p.Name + ">"
			}
		}
	}
	return ""
}
