//! Macros of `resource-api`: `#[capability]` and the entry point behind `export_plugin!`.
//!
//! Use them through `resource-api`, which re-exports them and documents the rules.

mod capability;

use proc_macro::TokenStream;
use quote::quote;
use syn::parse::Parser;

/// Turns a trait into an interface that can be called across plugin boundaries.
///
/// `#[capability(id = "org.example.thing", major = 1)]` on `trait Thing: Send + Sync` adds a handle
/// type `ThingHandle` that implements `Thing` by calling whatever object it holds, in whichever
/// library that lives. See the crate docs of `resource-api` for what may stand in signatures.
#[proc_macro_attribute]
pub fn capability(args: TokenStream, item: TokenStream) -> TokenStream {
    capability::expand(args.into(), item.into()).unwrap_or_else(|e| e.into_compile_error()).into()
}

/// The part of `export_plugin!` that needs a generated symbol name.
#[doc(hidden)]
#[proc_macro]
pub fn plugin_entry(input: TokenStream) -> TokenStream {
    let parser = syn::punctuated::Punctuated::<syn::Path, syn::Token![,]>::parse_terminated;
    let kinds = match parser.parse(input) {
        Ok(kinds) => kinds.into_iter().collect::<Vec<_>>(),
        Err(e) => return e.into_compile_error().into(),
    };
    quote! {
        // The name that abi_stable 0.11 looks a root module up by.
        #[unsafe(no_mangle)]
        pub static _1as_0lib_1header_0root_bmodule_bloader:
            ::resource_api::abi::generated::LibHeader = {
            extern "C" fn open() -> ::resource_api::abi::generated::RootModuleResult {
                ::resource_api::abi::root::open_plugin(
                    env!("CARGO_PKG_NAME"),
                    env!("CARGO_PKG_VERSION"),
                    // Of this library: resource-api itself may have been built otherwise.
                    cfg!(panic = "unwind"),
                    || vec![#(::resource_api::kind::<#kinds>()),*],
                )
            }
            ::resource_api::abi::generated::header(open)
        };

        // Read by hosts before they run anything of this library.
        const _: () = {
            use ::resource_api::abi::generated::{About, Note, content_len};
            const ABOUT: About<'static> = About {
                name: env!("CARGO_PKG_NAME"),
                version: env!("CARGO_PKG_VERSION"),
                unwinds: cfg!(panic = "unwind"),
                features: ::resource_api::with_cpu_features!(::resource_api::enabled_cpu_features),
                is_debug: cfg!(debug_assertions),
                kinds: &[#(<#kinds as ::resource_api::ResourceKind>::KIND),*],
                provides: &[#(<#kinds as ::resource_api::ResourceKind>::PROVIDES),*],
            };
            #[used]
            #[unsafe(link_section = ".note.resapi")]
            static NOTE: Note<{ content_len(&ABOUT) }> = Note::new(&ABOUT);
        };
    }
    .into()
}
